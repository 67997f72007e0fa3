"""What a config of a Triton kernel takes from a multiprocessor, estimated without a compiler.

Shared memory: the sum of its buffers, at least what Triton's compiler asks for, since a launch fails
where there is less, and little more; which buffers it makes was found by compiling kernels of all kinds,
and tests/runtime/test_toolchains.py compiles some again. Registers: the accumulator, the scores and the
probabilities live through every step, a lower bound that ptxas may exceed (spills show in `attnc
explain`). Non-goal: ranking the configs that fit; that is measured (`attnc tune`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from attnc.effort import memo, memo_by_object, spend
from attnc.expr.nodes import Expr, Load, walk
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import BackwardConfig, ForwardConfig, Summation, TileConfig
from attnc.model.tensors import Tensor
from attnc.plan.device import DEVICES, Device
from attnc.plan.fitting import phase_of
from attnc.plan.ir import Axis
from attnc.plan.joined import joins_rows
from attnc.plan.layout import Buffer, Estimate, SharedBytes, Which
from attnc.plan.lists import PRODUCT_COLUMNS, PRODUCT_KEYS, PRODUCT_STAGES, adds_to_keys, listing_of
from attnc.plan.loads import axes_of
from attnc.plan.signature import block, feature, parts, tile_columns, value_columns

#: Rows of a product from which on tensor cores read operands in shared memory, if they can.
FEWEST_FROM_SHARED = 64


@dataclass(frozen=True, kw_only=True)  # no slots: what several buffers ask for is found once
class SharedMemory:
    """What lies in shared memory at a time. One operand of the loop stays, another is streamed.

    by_mma: tensor cores read their operands there, and so the last tile stays until they are done with it;
    elsewhere operands go on to registers at once. copies: tiles of what is streamed that are under way or
    waiting.
    """

    config: TileConfig
    attention: Attention
    device: Device
    kernel: Which

    @property
    def buffers(self) -> Iterator[Buffer]:
        tiles = {name: (rows, width) for name, rows, width in self._matrices}
        size, is_f32 = self._dtype.bytes, self._dtype is DType.F32
        for name in self._staying:
            yield _buffer(name, tiles[name], size, 2 if is_f32 else 1)
        copies = self._stages - 1 if is_f32 else self._stages if self._by_mma else self._copies
        streamed = [
            _buffer(name, tiles[name], self._count_stored_bytes(name), copies) for name in self._streamed
        ]
        yield from streamed
        yield from self._list_converted(tiles, streamed)
        if is_f32:  # the tile at hand, in two numbers of 11 bits
            largest = max(self._streamed, key=lambda name: tiles[name][0] * tiles[name][1])
            yield _buffer(f"{largest} now", tiles[largest], size, 2)
        yield from self._loads
        yield from self._passing
        if self.device.has_tma:
            yield Buffer(name="barriers", shape="and alignment", bytes=1024)

    @cached_property
    def columns(self) -> tuple[int, int]:
        attention = self.attention
        d = block(feature(attention.q)) if self._walks_over_queries else tile_columns(attention)
        if self._joins_rows:
            return d, d
        if self.kernel != "forward" and attention.v.storage.is_part:
            return d, block(parts(attention)[0].width)
        return d, value_columns(attention) if self.kernel == "forward" else block(feature(attention.v))

    @cached_property
    def _joins_rows(self) -> bool:
        return self.kernel in ("dq", "dk") and joins_rows(self.attention)

    @property
    def _walks_over_queries(self) -> bool:
        return self.kernel == "forward" and self._inner == "q"

    @property
    def _decodes(self) -> bool:
        config = self.config
        splits = isinstance(config, ForwardConfig) and config.split_kv != 1
        return config.loops == ("kv",) or config.pack == "gqa" or splits

    @cached_property
    def _shares_v(self) -> bool:
        """Whether v has no memory of its own: it is the first part of k's columns."""
        if not self.attention.v.storage.is_part or self._walks_over_queries:
            return False
        return self.kernel != "forward" or parts(self.attention)[0].width == feature(self.attention.v)

    @property
    def _tile(self) -> tuple[int, int]:
        return self.config.tile_q, self.config.tile_kv

    @cached_property
    def _dtype(self) -> DType:
        return DType(self.attention.q.dtype)

    def _list_converted(
        self, tiles: Mapping[str, tuple[int, int]], streamed: Iterable[Buffer]
    ) -> Iterator[Buffer]:
        """Yields the tile at hand of k or v of 8 bits, in the type of q: where tensor cores read it, or where
        it passes to the threads that multiply it. For what passes in 8 bits the buffers of such tiles serve
        too, and for what passes in 16 where no later tile is on its way to them.
        """
        there = sum(buffer.bytes for buffer in streamed)
        found = []
        for name in filter(self._is_narrow, self._streamed):
            made = _buffer(f"{name} converted", tiles[name], self._dtype.bytes, 1)
            is_apart = self._by_mma or (self._stays(name) and self._stages > 1)
            found.append(made if is_apart else replace(made, bytes=max(0, made.bytes - there)))
        if found:
            yield max(found, key=lambda buffer: buffer.bytes)

    def _is_narrow(self, name: str) -> bool:
        return self._count_stored_bytes(name) != self._dtype.bytes

    def _stays(self, name: str) -> bool:
        """Returns whether a tile of 8 bits becomes one of 16 in the threads that loaded it: that of v, or of
        k where v is part of it.
        """
        holds_v = name == ("k" if self._shares_v else "v")
        return holds_v and self._is_narrow(name) and self._tile[0] < FEWEST_FROM_SHARED

    def _count_stored_bytes(self, name: str) -> int:
        if name in ("k", "v"):
            return DType(self.attention.tensor(name).dtype).bytes
        return self._dtype.bytes

    @cached_property
    def _inner(self) -> Axis:
        if self.kernel == "forward":
            return "q" if self.config.loops == ("kv", "q") else "kv"
        return "kv" if self.kernel in ("dq", "rows") else "q"

    @property
    def _matrices(self) -> Iterator[tuple[str, int, int]]:
        (tile_q, tile_kv), (d, dv) = self._tile, self.columns
        yield from (("q", tile_q, d), ("do", tile_q, dv), ("k", tile_kv, d))
        yield "v", tile_kv, 0 if self._shares_v else dv

    @property
    def _staying(self) -> tuple[str, ...]:
        if self._inner == "kv":
            return ("q",) if self.kernel == "forward" else ("q", "do")
        if self._weighs:
            return ()
        return ("k",) if self.kernel == "dv" else ("k", "v")

    @property
    def _streamed(self) -> tuple[str, ...]:
        if self._inner == "kv":
            return ("k", "v")
        return ("q",) if self.kernel == "forward" else ("q", "do")

    @cached_property
    def _stages(self) -> int:
        """A tile whose address comes from a block table waits for two loads, one after the other, and so
        takes two stages; the decode kernel looks pages up itself, a tile ahead.
        """
        stages = max(1, self.config.stages)
        if self.attention.k.storage.is_paged and not self._decodes:
            return max(min(stages, 2), (stages + 1) // 2)
        return stages

    @property
    def _copies(self) -> int:
        return max(1, self._stages - 1)

    @cached_property
    def _by_mma(self) -> bool:
        """Tiles of fewer than 64 rows are for the older instruction."""
        rows = self._tile[1] if self._inner == "q" and self.kernel != "forward" else self._tile[0]
        return self.device.has_mma_from_shared and rows >= FEWEST_FROM_SHARED

    @property
    def _loads(self) -> Iterator[Buffer]:
        rows = dict(zip(("q", "kv"), self._tile, strict=True))
        for load in () if self._weighs else find_loads(self.attention.score, self.attention.mask):
            if self._inner in (axes := axes_of(load)):
                size = DType(self.attention.tensor(load.tensor).dtype).bytes
                columns = rows["kv"] if len(axes) == 2 else 1
                yield _buffer(
                    load.tensor, (rows["q" if len(axes) == 2 else self._inner], columns), size, self._copies
                )
        if self.attention.k.storage.is_paged and self._inner == "kv":
            yield _buffer("page", (rows["kv"], 1), 4, self._copies)
        if self._weighs:
            copies = self._stages if self._by_mma else self._copies
            yield _buffer("weights", (2 * rows["q"], rows["kv"]), self._dtype.bytes, copies)
        elif self._inner == "q":
            for name in ("m", "l") if self.kernel == "forward" else ("lse", "delta"):
                yield _buffer(name, (rows["q"], 1), 4, self._copies)

    @property
    def _summing(self) -> Iterator[Buffer]:
        """What tensor cores sum over the keys of stick-breaking: ones, once for each direction, and with keys
        as rows the summands, as numbers of 16 bits.
        """
        tile_q, tile_kv = self._tile
        over_q, parts = self.kernel in ("forward", "dq"), 3 if self._dtype is DType.F32 else 2
        if not over_q:
            yield _buffer("summands", (tile_kv, tile_q), 2, parts)
        if over_q or self.config.warps * 16 > tile_kv:
            once = self.kernel == "forward" and not self.device.has_tensor_memory
            yield _buffer("ones", (tile_kv, tile_kv), 2, 1 if once else 2)
        if self.kernel != "forward":
            yield _buffer("edges", (tile_q, 1), 4, 2)

    @property
    def _passing(self) -> Iterator[Buffer]:
        (tile_q, tile_kv), size = self._tile, self._dtype.bytes
        d, dv = self.columns
        is_f32, outside_in = self._dtype is DType.F32, self.kernel == "forward" and self._inner == "q"
        if outside_in or not self._by_mma:
            yield _buffer("p", (tile_q, tile_kv), size, 1)
        if self.attention.softmax.form == "stick_breaking":
            yield from self._summing
        if self.kernel == "forward" and self.config.persistent:
            # the next tile begins while this one's results are on their way
            yield _buffer("lse", (tile_q, 1), 4, 1)
            if self.device.has_tma:
                yield _buffer("o", (tile_q, dv), DType(self.attention.o.dtype).bytes, 1)
        takes_v = self._shares_v and not self._weighs
        if takes_v and self._copies == 1 and not self._by_mma and not self._stays("k"):
            # at most 256 bytes of a thread at a time, from its registers for k to those of another for v; the
            # other columns of k, and p, are not there then
            moved = min(tile_kv * dv * size, self.config.warps * 32 * 256)
            beyond = moved - (tile_kv * (d - dv) + tile_q * tile_kv) * size
            yield Buffer(name="v", shape="beyond k and p", bytes=max(0, beyond))
        if self.attention.softmax.dropout is not None and self._by_mma and not self.device.has_tensor_memory:
            # drawn four keys to a thread, and used by rows; beside a load of each query and key that is on
            # its way, by those of the load as well
            copies = 2 if self._stages > 1 and self.kernel != "dq" and self._loads_pairs else 1
            yield _buffer("keep", (tile_q, tile_kv), 1, copies)
        elif self.attention.softmax.dropout is not None and listing_of(self.attention) is not None:
            yield _buffer("keep", (tile_q, tile_kv), 1, 1)  # drawn sixteen keys to a thread
        if outside_in:
            yield _buffer("acc", (tile_q, dv), 4, 2 if self.device.has_tensor_memory else 1)
        if self._joins_rows:
            in_registers = self._by_mma and self._keeps_weights
            if self.kernel == "dq" and not self.device.has_tensor_memory:
                yield (
                    _buffer("ds", (tile_q, tile_kv), size, 1)
                    if in_registers
                    else _buffer("products", (2 * tile_q, tile_kv), 4, 1)
                )
            elif self.kernel == "dq" and self._by_mma and self._stages > 1:
                yield _buffer("k turned", (tile_kv, d), size, self._stages)
        elif self.device.has_tensor_memory:  # what two products read, once by rows and once by columns
            for name in {"dq": ("k",), "dk": ("q",), "dkdv": ("q", "do")}.get(self.kernel, ()):
                rows, columns = (tile_kv, d) if name == "k" else (tile_q, d if name == "q" else dv)
                yield _buffer(f"{name} turned", (rows, columns), size, 1)
            if self.kernel == "forward" and self._shares_v and not self._decodes:
                yield _buffer("v turned", (tile_kv, dv), size, self._stages)
        if self._keeps_weights:  # rows of 16 bytes more: read by columns, and written by rows
            element = 4 if self.device.has_tensor_memory else size
            yield _buffer("weights", (tile_q, tile_kv + 16 // size), element, 1)
        if self.kernel != "forward" and self._stores_scores:
            yield _buffer("ds", (tile_q, tile_kv), 4, 1)
        if self._dq_added in ("atomic", "sequential"):
            yield _buffer("dq", (tile_q, d), 4, 1 if self._dq_added == "atomic" else self._copies + 1)
            yield _buffer("ds", (tile_q, tile_kv), size, 2 if self.device.has_tensor_memory else 1)
            if is_f32:
                yield _buffer("ds now", (tile_q, tile_kv), size, 2)
                yield _buffer("k now", (tile_kv, d), size, 2)

    @property
    def _adds_as_it_comes(self) -> bool:
        sums = dict(self.config.accumulates) if isinstance(self.config, BackwardConfig) else {}
        is_atomic = "atomic" in (sums.get("k"), sums.get("v"))
        return self.kernel == "dq" and is_atomic and adds_to_keys(self.attention)

    @property
    def _keeps_weights(self) -> bool:
        """Whether p and ds of each head and key stay in memory: the same kernel, or the next, multiplies
        them.
        """
        in_turns = self.kernel == "dq" and self._joins_rows and adds_to_keys(self.attention)
        return in_turns or self._adds_as_it_comes

    @property
    def _weighs(self) -> bool:
        return self.kernel == "dk" and self._joins_rows

    @property
    def product_bytes(self) -> int:
        """What products over the heads of a query take, when all else has gone: rows of do and q of twice the
        heads of a tile, which stay, stages of their weights, and, of wgmma, the sum, which is added as rows.
        """
        if not self._adds_as_it_comes:
            return 0
        columns = min(PRODUCT_COLUMNS, max(self.columns))
        heads, operands = 2 * self.config.tile_q, 2 if self._shares_v else 1
        rows = operands * heads * (columns + PRODUCT_STAGES * PRODUCT_KEYS) * self._dtype.bytes
        joined = PRODUCT_KEYS * columns * 4 if self.device.has_mma_from_shared else 0
        return rows + joined + 1024

    @property
    def _dq_added(self) -> Summation | None:
        if self.kernel != "dkdv" or "q" not in self.attention.grads:
            return None
        return self.config.accumulate("q") if isinstance(self.config, BackwardConfig) else None

    @property
    def _loads_pairs(self) -> bool:
        return any(len(axes_of(load)) == 2 for load in find_loads(self.attention.score, self.attention.mask))

    @property
    def _stores_scores(self) -> bool:
        return any(
            load.tensor in self.attention.grads and len(axes_of(load)) == 2
            for load in find_loads(self.attention.score)
        )


@memo
def find_loads(*expressions: Expr) -> tuple[Load, ...]:
    """Returns the loads in expressions, each once."""
    nodes = dict.fromkeys(node for expr in expressions for node in walk(expr))
    return tuple(node for node in nodes if isinstance(node, Load))


def _buffer(name: str, tile: tuple[int, int], size: int, count: int) -> Buffer:
    rows, columns = tile
    shape = f"{rows}x{columns}" if count == 1 else f"{count} x {rows}x{columns}"
    return Buffer(name=name, shape=shape, bytes=count * rows * columns * size)


_THREADS_PER_WARP = 32
#: What an estimate costs.
_STEPS = 40
#: Addresses, loop counters, row statistics: what every kernel needs besides its tiles.
_BASE_REGISTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A config that cannot run on a device: it needs `needs` of what the device has `limit` of. because: the
    reason in other words; instead: what to write, "" to look for it.
    """

    config: TileConfig
    what: str
    needs: int
    limit: int
    unit: str
    because: str = ""
    instead: str = ""

    @property
    def excess(self) -> float:
        return self.needs / self.limit

    def __str__(self) -> str:
        if self.because:
            return self.because
        return f"needs {self.needs} {self.unit} of {self.what}; the limit is {self.limit} {self.unit}"


def estimate(config: TileConfig, variant: Variant, device: Device, kernel: Which = "forward") -> Estimate:
    """Returns the needs of the forward kernel of this variant on the device, or of one of the backward."""
    known = _known_estimates(variant)
    key = (config, kernel, _memory_kind(device))
    if key not in known:
        known[key] = _estimate(config, variant, device, kernel)
    return known[key]


@memo_by_object
def _known_estimates(variant: Variant) -> dict[Hashable, Estimate]:
    """Returns where estimates for a variant are kept: launchers ask for those that configs were chosen by."""
    return {}


def _estimate(config: TileConfig, variant: Variant, device: Device, kernel: Which) -> Estimate:
    spend(_STEPS)
    attention = variant.attention
    tile_q, tile_kv = config.tile_q, config.tile_kv
    memory = SharedMemory(config=config, attention=attention, device=device, kernel=kernel)
    d, dv = memory.columns
    size, threads = DType(attention.q.dtype).bytes, config.warps * _THREADS_PER_WARP
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
    buffers = [buffer for buffer in memory.buffers if buffer.bytes]
    # What is stored in the end changes its layout there, when all else has gone.
    result = accumulated[kernel] * (DType(attention.o.dtype).bytes if kernel == "forward" else size)
    beyond = max(result, memory.product_bytes) - sum(buffer.bytes for buffer in buffers)
    if beyond > 0:
        buffers.append(Buffer(name="result", shape="beyond the others", bytes=beyond))
    return Estimate(buffers=tuple(buffers), registers=registers)


def misfit(
    config: TileConfig, variant: Variant, device: Device, kernel: Which = "forward"
) -> Rejection | None:
    """Returns why the config cannot run on the device; None if it can."""
    if because := unreadable(variant.attention, device):
        return Rejection(
            config=config,
            what="compute capability",
            needs=max(map(needed_capability, (variant.attention.k, variant.attention.v))),
            limit=device.capability,
            unit="tenths",
            because=because,
        )
    if (summed := _count_summed(config, kernel)) < _SHORTEST and _joins_narrow_words(variant.attention):
        return Rejection(
            config=config,
            what="an operand's summed axis",
            needs=_SHORTEST,
            limit=summed,
            unit="elements",
            because=f"sums over {summed} elements: too few for Triton where elements of 8 bits stand beside"
            " dropout",
        )
    if _divides_sums(variant.attention, kernel):
        groups, each, axis = _share_summed(config, kernel)
        key = "tile.kv" if axis == "keys" else "tile.q"
        if each < _FEWEST:
            return Rejection(
                config=config,
                what=f"the {axis} of four warps",
                needs=_FEWEST,
                limit=each,
                unit=axis,
                because=f"gives {each} {axis} to each of {groups} groups of four warps: sums over them need"
                f" {_FEWEST}, or Triton's leave shared memory",
                instead=f"write '{key} = {_FEWEST * groups}', or fewer warps",
            )
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


def unreadable(attention: Attention, device: Device) -> str:
    """Returns why Triton compiles nothing that reads these keys and values for the device; "" if it does."""
    newer = [t for t in (attention.k, attention.v) if needed_capability(t) > device.capability]
    if not newer:
        return ""
    needed = max(map(needed_capability, newer))
    first, here = (f"{number // 10}.{number % 10}" for number in (needed, device.capability))
    names, dtype = " and ".join(tensor.name for tensor in newer), newer[0].dtype
    return f"{names} of {dtype} need a GPU of compute capability {first} or newer, and this has {here}"


def needed_capability(tensor: Tensor) -> int:
    """Returns ten times the compute capability of the first devices for which Triton converts a tensor."""
    return DType(tensor.dtype).facts.capability


#: Elements that `tl.dot` sums over below which Triton lays an operand out wrongly that was computed from
#: 8-bit words and from a `tl.join`, as dropout's words are: runs of 32 bits / 8 bits * 2 for each of four
#: threads. Releases up to 3.7 count some elements twice there and others never (triton-lang/triton, pulls
#: 10645 and 11691).
_SHORTEST = 32


#: Queries (of a kernel over keys; of one over queries, keys) that each group of four warps has where they
#: share the summed axis of a tile, below which Triton 3.6 reads beyond shared memory: seen on an H200 with 8
#: warps, of sticks with 32 queries and 64 keys, and of f32's dq with 64 queries and 16 keys.
_FEWEST = 32


def _divides_sums(attention: Attention, kernel: Which) -> bool:
    """Returns whether a kernel is one of those that were seen to read beyond shared memory."""
    phase = phase_of(kernel)
    if attention.softmax.form == "stick_breaking" and phase == "dkdv":
        return True
    return attention.q.dtype == "f32" and phase == "dq"


def _share_summed(config: TileConfig, kernel: Which) -> tuple[int, int, str]:
    """Returns how many groups of four warps share the summed axis of a tile, of which each has 64 rows, how
    much of it each has, and what it is of; of a group alone, no less than is needed.
    """
    rows, summed, axis = config.tile_q, config.tile_kv, "keys"
    if phase_of(kernel) == "dkdv":
        rows, summed, axis = summed, rows, "queries"
    groups = max(1, config.warps // 4 // max(1, rows // 64))
    return groups, _FEWEST if groups == 1 else summed // groups, axis


def _count_summed(config: TileConfig, kernel: Which) -> int:
    of_rows = phase_of(kernel) == "dkdv"
    return config.tile_q if of_rows else config.tile_kv


def _joins_narrow_words(attention: Attention) -> bool:
    if attention.softmax.dropout is None:
        return False
    nodes = (node for expr in (attention.score, attention.mask) for node in walk(expr))
    read = {node.tensor for node in nodes if isinstance(node, Load)}
    return any(DType(x.dtype).bytes == 1 for x in attention.extras if x.name in read)


def room(config: TileConfig, variant: Variant, kernel: Which = "forward") -> SharedBytes:
    """Returns bytes of shared memory that a block must be allowed for a launcher to take the config: the
    fewest such that every supported device that allows as many has what the config needs there. Where that
    would refuse a device that has enough, what each generation needs.
    """
    alike: dict[tuple[bool, ...], int] = {}
    for device in DEVICES.values():
        if (kind := _memory_kind(device)) not in alike:
            alike[kind] = estimate(config, variant, device, kernel).shared
    needs = {device: alike[_memory_kind(device)] for device in DEVICES.values()}
    enough = [size for device, size in needs.items() if size <= device.shared_per_block]
    too_few = [
        device.shared_per_block + 1 for device, size in needs.items() if size > device.shared_per_block
    ]
    least = max(min(enough, default=0), *too_few, 0)
    if any(size <= device.shared_per_block < least for device, size in needs.items()):
        return tuple({device.major: size for device, size in needs.items()}.items())
    return least


def _memory_kind(device: Device) -> tuple[bool, ...]:
    """Returns all that estimates know of a device."""
    return device.has_mma_from_shared, device.has_tma, device.has_tensor_memory


def count_staged_bytes(config: TileConfig, variant: Variant) -> int:
    """Returns bytes of shared memory that a block takes where tensor cores read tiles there and so more of
    them wait; 0 if its tiles are too small for that.
    """

    def shared(device: Device) -> int:
        return estimate(config, variant, device).shared

    readers = [device for device in DEVICES.values() if device.has_mma_from_shared]
    more = (shared(d) for d in readers if shared(d) > shared(replace(d, has_mma_from_shared=False)))
    return max(more, default=0)
