"""Keys and values of 8 bits on Hopper: tiles come as they lie in memory, and are converted in shared memory.

wgmma multiplies k and v of q's type. So each warp of the warpgroup that copies has rows of every tile for its
own: it copies them, waits for them, converts them (exactly: f16 and bf16 hold every number of 8 bits), and
writes them to where TMA would have put rows of 16 bits. Those that multiply read these, and are the same as
in a kernel for 16 bits; so are its bits. Since nobody else touches a warp's rows of 8 bits, no barrier says
that they may be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attnc.expr.nodes import Binary, Call, Const, Expr, Ref
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.schedule import Schedule
from attnc.model.tensors import Tensor
from attnc.plan.columns import plan_column_scales
from attnc.plan.conversion import count_alike, count_alike_in
from attnc.plan.ir import Fetch
from attnc.plan.ir.kernel import TILE_COLUMN
from attnc.plan.loads import LoadNames
from attnc.plan.signature import feature, normalise

#: Types of scales that lanes keep as they lie in memory, several at once.
_KEPT_AS_STORED = (DType.F32, DType.U8)
#: Warps that copy and convert; columns of a piece of a tile of 8 bits, which are as many bytes.
CONVERTING_WARPS, PIECE_OF_BYTES = 4, 128
#: Columns that a lane converts at a time, and of a tile in shared memory that lie together.
COLUMNS_OF_A_LANE, COLUMNS_OF_A_PANEL = 16, 64
#: Fewest and most tiles of 8 bits in shared memory: one is converted while others come.
FEWEST_AHEAD, _MOST_AHEAD = 2, 4
#: What the bytes of scales are a multiple of, as the place of a swizzled tile behind them has to be.
SCALE_GRANULE = 1024
#: Fewest registers of a thread that converts.
CONVERTING_REGISTERS = 48
#: Rows that the swizzle repeats after, of which a warp has whole runs; and rows that its lanes look up.
_PERIOD, _MOST_ROWS = 8, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowPart:
    """A tensor whose tiles are copied as they lie in memory. name: "k" or "v"; number: among those that are;
    columns: of a row; block: neighbouring columns that have one scale, scales: of a row, both 0 where columns
    have no scales.
    """

    name: str
    number: int
    dtype: DType
    columns: int
    block: int = 0
    scales: int = 0

    @property
    def bytes(self) -> int:
        return self.columns * self.dtype.bytes

    @property
    def panels(self) -> int:
        return -(-self.bytes // PIECE_OF_BYTES)

    @property
    def width(self) -> int:
        return PIECE_OF_BYTES // self.dtype.bytes

    @property
    def is_converted(self) -> bool:
        return self.dtype.is_narrow

    def find_neighbours(self, fetch: Fetch, dtype: DType) -> int | None:
        """Returns the axis along which all scales of a row that a load reads lie next to each other; None if
        there is none, or these are of a type that lanes keep one by one.
        """
        load = fetch.load
        reading = [axis for axis, index in enumerate(load.indices) if count_alike_in(index)]
        if dtype not in _KEPT_AS_STORED or len(reading) != 1:
            return None
        match load.indices[reading[0]], load.extents[reading[0]]:
            case Binary(op="//", left=left, right=Const(value=self.block)), Const(value=int() as size):
                return reading[0] if left == TILE_COLUMN and size >= self.scales else None
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """What tiles of k and v are copied as they lie in memory, and converted if they have 8 bits."""

    parts: tuple[NarrowPart, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def warps(self) -> int:
        return CONVERTING_WARPS if self.parts else 1

    @property
    def converts(self) -> bool:
        return any(part.is_converted for part in self.parts)

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def panels(self) -> int:
        return sum(part.panels for part in self.parts)

    @property
    def scales(self) -> int:
        return sum(part.scales for part in self.parts)

    @property
    def barriers(self) -> int:
        return CONVERTING_WARPS * len(self.parts)

    def tile_bytes(self, tile_kv: int) -> int:
        """Returns bytes of a tile of 8 bits of so many keys, of all tensors."""
        return tile_kv * self.panels * PIECE_OF_BYTES

    def scale_bytes(self, tile_kv: int) -> int:
        """Returns bytes of the scales of a tile of so many keys, in whole runs of the swizzle."""
        return -(-4 * tile_kv * self.scales // SCALE_GRANULE) * SCALE_GRANULE

    def count_ahead(self, tile_kv: int, rooms: Iterable[int]) -> int:
        """Returns how many tiles of 8 bits a block has: as many as the first of these rooms that has bytes
        for enough of them; at least the fewest.
        """
        size = self.tile_bytes(tile_kv) + 8 * self.barriers
        found = (min(room // size, _MOST_AHEAD) for room in rooms)
        return next((count for count in found if count >= FEWEST_AHEAD), FEWEST_AHEAD)


def refuse_column_scale(attention: Attention, schedule: Schedule, name: str) -> tuple[str, ...]:
    """Returns why tiles of k or v cannot be multiplied by a scale of their columns as they are converted, and
    what to write instead; nothing if they can.
    """
    of_triton = "write a schedule for 'triton'"
    if not schedule.is_decode:
        label = "prompts multiply tiles as they were copied, where nothing is converted before"
        return label, "remove 'convert = tiles'"
    tensor = attention.k if name == "k" or attention.v.storage.is_part else attention.v
    if not DType(tensor.dtype).is_narrow:
        return f"tiles of {tensor.dtype} are multiplied as they were copied", of_triton
    columns = COLUMNS_OF_A_LANE
    if _columns_alike(attention)[name] % columns:
        label = f"a lane converts {columns} columns at a time, by one scale"
        return label, f"give {columns} columns one scale, as by 'd // {columns}'", of_triton
    return ()


def refuse_joined_keys(attention: Attention, schedule: Schedule) -> tuple[str, ...]:
    """Returns why tiles of k cannot be joined with columns of another input, and what to write instead."""
    if not schedule.is_decode:
        return "prompts copy tiles of one input", "write 'loops = [kv], pack = gqa'"
    own, behind = feature(attention.k), feature(attention.q) - feature(attention.k)
    if own % COLUMNS_OF_A_PANEL or behind % COLUMNS_OF_A_LANE:
        shape = f"multiples of {COLUMNS_OF_A_PANEL} and {COLUMNS_OF_A_LANE} columns"
        return f"tiles are joined of {shape}, not of {own} and {behind}", "pad the last axes"
    if not (attention.v.storage.is_part and DType(attention.k.dtype).is_narrow):
        label = "keys of 8 bits are joined whose first columns are the values"
        return label, "write 'via prefix(k)' for v, or join the columns before the call"
    return ()


def narrow_of(attention: Attention, *, apart: bool = False) -> Narrow:
    """Returns what of k and v has 8 bits; of values that are part of the keys, the keys alone, unless tiles
    of them come apart.
    """
    stored = [tensor for tensor in (attention.k, attention.v) if apart or not tensor.storage.is_part]
    found = [tensor for tensor in stored if DType(tensor.dtype).is_narrow]
    return copy_as_stored(attention, found)


def copy_as_stored(attention: Attention, tensors: Iterable[Tensor]) -> Narrow:
    """Returns that tiles of these tensors, of k and v, are copied as they lie in memory."""
    parts = []
    for number, tensor in enumerate(tensors):
        name = "k" if tensor is attention.k else "v"
        block, scales = cut_columns(attention, name)
        part = NarrowPart(
            name=name,
            number=number,
            dtype=DType(tensor.dtype),
            columns=feature(tensor),
            block=block,
            scales=scales,
        )
        parts.append(part)
    return Narrow(parts=tuple(parts))


def cut_columns(attention: Attention, name: str) -> tuple[int, int]:
    """Returns how many neighbouring columns of k or v have one scale, and how many scales a row has: none
    where columns have no scales of their own.
    """
    columns, alike = feature(attention.k if name == "k" else attention.v), _columns_alike(attention)
    if name not in alike:
        return 0, 0
    block = min(alike[name] or columns, columns)
    return block, -(-columns // block)


def exponent_of(scale: Expr) -> str:
    """Returns the name of the byte of which an e8m0 scale is made, 2^(byte - 127); "" for other scales."""
    match scale:
        case Call("exp2", (Binary("-", Ref(name=name, within=(0, 255)), Const(value=127)),)):
            return name
    return ""


def _columns_alike(attention: Attention) -> Mapping[str, int]:
    """Returns how many neighbouring columns surely have one scale, of k and v as far as columns have one."""
    if not attention.column_scales:
        return {}
    normal = normalise(attention)
    scales = plan_column_scales(normal, LoadNames.of(normal), packs=True)
    return {scale.tensor: count_alike(scale) for scale in scales}


def narrow_misfit(tile_kv: int) -> str | None:
    """Returns why the rows of a tile of so many keys cannot be converted; None if they can."""
    step, most = _PERIOD * CONVERTING_WARPS, _MOST_ROWS * CONVERTING_WARPS
    if tile_kv % step == 0 and tile_kv <= most:
        return None
    why = f"{CONVERTING_WARPS} warps convert its rows, {_PERIOD} at once"
    return f"tile.kv = {tile_kv} is not a multiple of {step} up to {most}: {why}"
