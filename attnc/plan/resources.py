"""What a config of a Triton kernel takes from a multiprocessor, estimated without a compiler.

Shared memory: the pipeliner gives K and V one buffer for each stage, and one more tile each where a load is
in flight while wgmma still reads the last one; operands of the tensor cores that do not come from registers
lie there too. Registers: the accumulator, the scores and the probabilities live through every step. Both are
lower bounds that ptxas may exceed (spills show in `attnc explain`), so a config is rejected only when it
cannot work. Non-goal: ranking the configs that fit; that is measured (`attnc tune`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.expr.nodes import Const
from attnc.model.attention import Variant
from attnc.model.schedule import Config
from attnc.model.tensors import DType, Paged, Role, Tensor
from attnc.plan.device import DEVICES, Device
from attnc.plan.ir_backward import KernelName
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
    tile_q, tile_kv = config.number("tile.q"), config.number("tile.kv")
    stages, warps = config.number("stages"), config.number("warps")
    columns = parts(variant.attention)
    d, dv = sum(tile_width(part.width) for part in columns), tile_width(features(variant.attention.v))
    dtype = DType(variant.attention.q.dtype)
    size, threads = dtype.bytes, warps * _THREADS_PER_WARP
    if kernel != "forward":
        tiles = (tile_q, tile_kv)
        return _estimate_backward(kernel, *tiles, max(1, stages), threads, d, dv, dtype)
    depth = _depth(stages, tile_q, config, variant)
    loaded_v = dv if len(columns) == 1 else 0  # else v is the first part of k
    q = _held("q", tile_q, d, dtype)
    buffers = [
        # A single stage still passes through shared memory, since the operands change layout on the way.
        Buffer(name="k", shape=f"{depth} x {tile_kv}x{d}", bytes=depth * tile_kv * d * size),
        Buffer(name="v", shape=f"{depth} x {tile_kv}x{loaded_v}", bytes=depth * tile_kv * loaded_v * size),
    ]
    registers = {
        "acc": tile_q * dv // threads,
        "s": tile_q * tile_kv // threads,
        "p": tile_q * tile_kv * size // 4 // threads,
        "other": _BASE_REGISTERS,
    }
    if device.has_wgmma:
        buffers.insert(0, q)  # wgmma reads its operands from shared memory
    else:
        registers["q"] = tile_q * d * size // 4 // threads
    return Estimate(buffers=tuple(buffers), registers=registers)


def _depth(stages: int, tile_q: int, config: Config, variant: Variant) -> int:
    """Tiles of k, and of v, that lie in shared memory at a time.

    A tile whose address comes from a block table waits for two loads, one after the other, and so takes two
    stages; the decode kernel looks pages up itself, a tile ahead. Tiles of fewer than 64 rows are not
    wgmma's: their operands leave shared memory at once.
    """
    knobs = config.values
    decodes = knobs.get("loops") == ("kv",) or knobs.get("pack") == "gqa" or knobs.get("split.kv", 1) != 1
    waits = isinstance(variant.attention.k.storage, Paged) and not decodes
    turns = (stages + 1) // 2 if waits else stages
    return max(1, turns if tile_q >= 64 else turns - 1)


def are_wide(d: int, dv: int) -> bool:
    """Whether the accumulators of dk and dv cannot share a kernel: then each gets its own, at the price of
    one more dot (on an H200 1.3 to 1.5 times faster at 256 columns than small tiles).
    """
    return d + dv > 256


def _estimate_backward(
    kernel: KernelName, tile_q: int, tile_kv: int, stages: int, threads: int, d: int, dv: int, dtype: DType
) -> Estimate:
    """Over q tiles: q and do stay, k and v are streamed; over kv tiles the other way round."""
    size = dtype.bytes
    widths = {"q": (tile_q, d), "do": (tile_q, dv), "k": (tile_kv, d), "v": (tile_kv, dv)}
    over_q = kernel in ("dq", "rows")
    staying = ("q", "do") if over_q else ("k",) if kernel == "dv" else ("k", "v")
    streamed = ("k", "v") if over_q else ("q", "do")
    buffers = [_held(name, *widths[name], dtype) for name in staying]
    buffers += [
        Buffer(name=name, shape=f"{stages} x {rows}x{width}", bytes=stages * rows * width * size)
        for name, (rows, width) in ((name, widths[name]) for name in streamed)
    ]
    accumulated = {
        "dq": tile_q * d,
        "rows": 0,
        "dkdv": tile_kv * (d + dv),
        "dk": tile_kv * d,
        "dv": tile_kv * dv,
    }
    scores = tile_q * tile_kv // threads
    registers = {"acc": accumulated[kernel] // threads, "s": scores}
    if kernel != "dv":
        registers["dp"] = scores
    registers |= {"p": tile_q * tile_kv * size // 4 // threads, "other": _BASE_REGISTERS}
    return Estimate(buffers=tuple(buffers), registers=registers)


def _held(name: str, rows: int, width: int, dtype: DType) -> Buffer:
    """A tile that stays for the whole loop. One of f32 is split, once, into two numbers of 11 bits for each
    element, which the tensor cores multiply one after the other (3xTF32).
    """
    numbers = 2 if dtype is DType.F32 else 1
    shape = f"{numbers} x {rows}x{width}" if numbers > 1 else f"{rows}x{width}"
    return Buffer(name=name, shape=shape, bytes=numbers * rows * width * dtype.bytes)


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


def shared_memory(config: Config, variant: Variant, kernel: Which = "forward") -> int:
    """Bytes of shared memory of one block, the largest over the supported devices: what a launcher compares
    with its device's limit.
    """
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
