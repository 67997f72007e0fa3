"""What a config of a Triton kernel takes from a multiprocessor, estimated without a compiler.

Shared memory: at least what Triton's compiler asks for, since a launch fails where there is less, and little
more; which buffers it makes was found by compiling kernels of all kinds, and tests/runtime/test_cubin.py
compiles some again. Registers: the accumulator, the scores and the probabilities live through every step, a
lower bound that ptxas may exceed (spills show in `attnc explain`). Non-goal: ranking the configs that fit;
that is measured (`attnc tune`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.expr.nodes import Const, Load, walk
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Config
from attnc.model.tensors import DType, Paged, Role, Tensor
from attnc.plan.device import DEVICES, Device
from attnc.plan.ir import Axis
from attnc.plan.ir_backward import KernelName
from attnc.plan.loads import axes_of
from attnc.plan.storage import parts

#: The kernel that an estimate is of.
Which: TypeAlias = Literal["forward"] | KernelName

_THREADS_PER_WARP = 32
#: Addresses, loop counters, row statistics: what every kernel needs besides its tiles.
_BASE_REGISTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A piece of shared memory: `shape` is for the reader, e.g. "2 x 64x128"."""

    name: str
    shape: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one block of a config needs on one device: shared memory by buffer, registers of a thread by
    value.
    """

    buffers: tuple[Buffer, ...]
    registers: Mapping[str, int]

    @property
    def shared(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def registers_per_thread(self) -> int:
        return sum(self.registers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A config that cannot run on a device: it needs `needs` of what the device has `limit` of."""

    config: Config
    what: str
    needs: int
    limit: int
    unit: str

    @property
    def excess(self) -> float:
        return self.needs / self.limit

    def __str__(self) -> str:
        return f"needs {self.needs} {self.unit} of {self.what}; the limit is {self.limit} {self.unit}"


def estimate(config: Config, variant: Variant, device: Device, kernel: Which = "forward") -> Estimate:
    """The needs of the forward kernel of this variant on the device, or of one of the backward."""
    attention = variant.attention
    tile_q, tile_kv = config.number("tile.q"), config.number("tile.kv")
    d, dv = _width(attention), tile_width(features(attention.v))
    size, threads = DType(attention.q.dtype).bytes, config.number("warps") * _THREADS_PER_WARP
    accumulated = {
        "forward": tile_q * dv,
        "dq": tile_q * d,
        "rows": 0,
        "dkdv": tile_kv * (d + dv),
        "dk": tile_kv * d,
        "dv": tile_kv * dv,
    }
    scores = tile_q * tile_kv // threads
    registers = {"acc": accumulated[kernel] // threads, "s": scores}
    if kernel not in ("forward", "dv"):
        registers["dp"] = scores
    registers |= {"p": tile_q * tile_kv * size // 4 // threads, "other": _BASE_REGISTERS}
    if kernel == "forward" and not device.has_mma_from_shared:
        registers["q"] = tile_q * d * size // 4 // threads
    buffers = [b for b in _Shared.of(config, variant, device, kernel).buffers if b.bytes]
    # What is stored in the end changes its layout there, when all else has gone.
    result = accumulated[kernel] * (DType(attention.o.dtype).bytes if kernel == "forward" else size)
    beyond = result - sum(buffer.bytes for buffer in buffers)
    if beyond > 0:
        buffers.append(Buffer(name="result", shape="beyond the others", bytes=beyond))
    return Estimate(buffers=tuple(buffers), registers=registers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What lies in shared memory at a time. One operand of the loop stays, another is streamed.

    by_mma: tensor cores read their operands there, and so the last tile stays until they are done with it;
    elsewhere operands go on to registers at once. copies: tiles of what is streamed that are under way or
    waiting.
    """

    config: Config
    attention: Attention
    device: Device
    kernel: Which

    @classmethod
    def of(cls, config: Config, variant: Variant, device: Device, kernel: Which) -> _Shared:
        return cls(config=config, attention=variant.attention, device=device, kernel=kernel)

    @property
    def buffers(self) -> Iterator[Buffer]:
        tiles = {name: (rows, width) for name, rows, width in self._matrices}
        size, is_f32 = self._dtype.bytes, self._dtype is DType.F32
        for name in self._staying:
            yield _buffer(name, tiles[name], size, 2 if is_f32 else 1)
        copies = self._stages - 1 if is_f32 else self._stages if self._by_mma else self._copies
        for name in self._streamed:
            yield _buffer(name, tiles[name], size, copies)
        if is_f32:  # the tile at hand, in two numbers of 11 bits
            largest = max(self._streamed, key=lambda name: tiles[name][0] * tiles[name][1])
            yield _buffer(f"{largest} now", tiles[largest], size, 2)
        yield from self._loads
        yield from self._passing
        if self.device.has_tma:
            yield Buffer(name="barriers", shape="and alignment", bytes=1024)

    @property
    def _tile(self) -> tuple[int, int]:
        return self.config.number("tile.q"), self.config.number("tile.kv")

    @property
    def _dtype(self) -> DType:
        return DType(self.attention.q.dtype)

    @property
    def _inner(self) -> Axis:
        if self.kernel == "forward":
            return "q" if self.config.values.get("loops") == ("kv", "q") else "kv"
        return "kv" if self.kernel in ("dq", "rows") else "q"

    @property
    def _matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of a tile of each matrix; a v that is the first part of k has no memory."""
        tile_q, tile_kv = self._tile
        d, dv = _width(self.attention), tile_width(features(self.attention.v))
        yield from (("q", tile_q, d), ("do", tile_q, dv), ("k", tile_kv, d))
        yield "v", tile_kv, dv if len(parts(self.attention)) == 1 else 0

    @property
    def _staying(self) -> tuple[str, ...]:
        if self._inner == "kv":
            return ("q",) if self.kernel == "forward" else ("q", "do")
        return ("k",) if self.kernel == "dv" else ("k", "v")

    @property
    def _streamed(self) -> tuple[str, ...]:
        if self._inner == "kv":
            return ("k", "v")
        return ("q",) if self.kernel == "forward" else ("q", "do")

    @property
    def _stages(self) -> int:
        """A tile whose address comes from a block table waits for two loads, one after the other, and so
        takes two stages; the decode kernel looks pages up itself, a tile ahead.
        """
        stages, knobs = max(1, self.config.number("stages")), self.config.values
        decodes = knobs.get("loops") == ("kv",) or knobs.get("pack") == "gqa" or knobs.get("split.kv", 1) != 1
        if isinstance(self.attention.k.storage, Paged) and not decodes:
            return max(min(stages, 2), (stages + 1) // 2)
        return stages

    @property
    def _copies(self) -> int:
        """Of what is not read by tensor cores from where it lies."""
        return max(1, self._stages - 1)

    @property
    def _by_mma(self) -> bool:
        """Tiles of fewer than 64 rows are for the older instruction."""
        rows = self._tile[1] if self._inner == "q" and self.kernel != "forward" else self._tile[0]
        return self.device.has_mma_from_shared and rows >= 64

    @property
    def _loads(self) -> Iterator[Buffer]:
        """Streamed besides: what score and mask read at each key, or row, of the inner loop."""
        rows = dict(zip(("q", "kv"), self._tile, strict=True))
        nodes = dict.fromkeys(node for e in (self.attention.score, self.attention.mask) for node in walk(e))
        for load in nodes:
            if isinstance(load, Load) and self._inner in (axes := axes_of(load)):
                size = DType(self.attention.tensor(load.tensor).dtype).bytes
                columns = rows["kv"] if len(axes) == 2 else 1
                yield _buffer(
                    load.tensor, (rows["q" if len(axes) == 2 else self._inner], columns), size, self._copies
                )
        if isinstance(self.attention.k.storage, Paged) and self._inner == "kv":
            yield _buffer("page", (rows["kv"], 1), 4, self._copies)
        if self._inner == "q":
            for name in ("m", "l") if self.kernel == "forward" else ("lse", "delta"):
                yield _buffer(name, (rows["q"], 1), 4, self._copies)

    @property
    def _passing(self) -> Iterator[Buffer]:
        """What passes through shared memory on its way to other threads, or to global memory."""
        (tile_q, tile_kv), size = self._tile, self._dtype.bytes
        d, dv = _width(self.attention), tile_width(features(self.attention.v))
        is_f32, outside_in = self._dtype is DType.F32, self.kernel == "forward" and self._inner == "q"
        if outside_in or not self._by_mma:
            yield _buffer("p", (tile_q, tile_kv), size, 1)
        if outside_in:
            yield _buffer("acc", (tile_q, dv), 4, 2 if self.device.has_tensor_memory else 1)
        if self.device.has_tensor_memory:  # what two products read, once by rows and once by columns
            for name in {"dq": ("k",), "dk": ("q",), "dkdv": ("q", "do")}.get(self.kernel, ()):
                rows, columns = (tile_kv, d) if name == "k" else (tile_q, d if name == "q" else dv)
                yield _buffer(f"{name} turned", (rows, columns), size, 1)
        if self.kernel != "forward" and self._stores_scores:
            yield _buffer("ds", (tile_q, tile_kv), 4, 1)
        added = self.config.values.get("accumulate.dq") if self.kernel == "dkdv" else None
        if added in ("atomic", "sequential"):
            yield _buffer("dq", (tile_q, d), 4, 1 if added == "atomic" else self._copies + 1)
            yield _buffer("ds", (tile_q, tile_kv), size, 2 if self.device.has_tensor_memory else 1)
            if is_f32:
                yield _buffer("ds now", (tile_q, tile_kv), size, 2)
                yield _buffer("k now", (tile_kv, d), size, 2)

    @property
    def _stores_scores(self) -> bool:
        """Whether a gradient has an element for each score."""
        return any(
            isinstance(node, Load) and node.tensor in self.attention.grads and len(axes_of(node)) == 2
            for node in walk(self.attention.score)
        )


def _buffer(name: str, tile: tuple[int, int], size: int, count: int) -> Buffer:
    rows, columns = tile
    shape = f"{rows}x{columns}" if count == 1 else f"{count} x {rows}x{columns}"
    return Buffer(name=name, shape=shape, bytes=count * rows * columns * size)


def _width(attention: Attention) -> int:
    """Columns of a tile of q or k."""
    return sum(tile_width(part.width) for part in parts(attention))


def are_wide(d: int, dv: int) -> bool:
    """Whether the accumulators of dk and dv cannot share a kernel: then each gets its own, at the price of
    one more dot (on an H200 1.3 to 1.5 times faster at 256 columns than small tiles).
    """
    return d + dv > 256


def misfit(config: Config, variant: Variant, device: Device, kernel: Which = "forward") -> Rejection | None:
    """Why the config cannot run on the device; None if it can."""
    needs = estimate(config, variant, device, kernel)
    if needs.shared > device.shared_per_block:
        return Rejection(
            config=config, what="shared memory", needs=needs.shared, limit=device.shared_per_block, unit="B"
        )
    live = needs.registers["acc"] + needs.registers["s"]
    if live > device.registers_per_thread:
        return Rejection(
            config=config,
            what="a thread's registers for acc and s",
            needs=live,
            limit=device.registers_per_thread,
            unit="words",
        )
    return None


def room(config: Config, variant: Variant, kernel: Which = "forward") -> int:
    """Bytes of shared memory that a block must be allowed for a launcher to take the config: the fewest such
    that every supported device that allows as many has what the config needs there.
    """
    needs = {device: estimate(config, variant, device, kernel).shared for device in DEVICES.values()}
    enough = [size for device, size in needs.items() if size <= device.shared_per_block]
    too_few = [
        device.shared_per_block + 1 for device, size in needs.items() if size > device.shared_per_block
    ]
    return max(min(enough, default=0), *too_few, 0)


def shared_memory(config: Config, variant: Variant, kernel: Which = "forward") -> int:
    """Bytes of shared memory of one block, the most over the supported devices."""
    return max(estimate(config, variant, device, kernel).shared for device in DEVICES.values())


def tile_width(features: int) -> int:
    """The width of a tile: Triton's tiles are powers of two, and tensor cores want at least 16."""
    return max(16, 1 << (features - 1).bit_length())


def features(tensor: Tensor) -> int:
    """The head dimension of q, k or v, a constant in every variant."""
    axis = tensor.axis(Role.FEATURE)
    size = tensor.shape[axis] if axis is not None else None
    if not isinstance(size, Const):
        raise ValueError(f"the head dimension of {tensor.name} is not a constant")
    return int(size.value)
