"""How a Hopper kernel lies on the machine: warpgroups, tiles in shared memory, barriers, registers by role.

The unit is wgmma.m64nNk16 (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): a warpgroup of four
warps multiplies 64 rows, whose results lie in its registers as pieces of mma.m16n8k16 do (`sm80.layout`).
Right operands, and q, are read from shared memory, where TMA writes them: a tile is pieces of 64 columns, 128
bytes a row, whose 16-byte chunks are permuted within a row (the 128-byte swizzle).

One warpgroup copies, one more draws what dropout keeps, the others multiply. The first ones give registers
away (setmaxnreg), and the others take them: for registers that the launch does not hold they would wait for
ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.model.dtypes import DType
from attnc.model.schedule import HopperConfig, TileConfig
from attnc.plan.device import DEVICES
from attnc.plan.sm80.layout import MMA, CudaLayout, Swizzle, chunk_of
from attnc.plan.sm90.narrow import CONVERTING_REGISTERS, FEWEST_AHEAD, Narrow
from attnc.plan.sm90.scores import COLUMN_BYTES

#: Rows of a wgmma, and columns of a piece of a tile of 16 bits: 128 bytes.
WGMMA_ROWS, PIECE, PIECE_BYTES = 64, 64, 128
#: Registers of a multiprocessor, and steps of a thread's; what a thread that copies does with.
_REGISTERS, _STEP, FEWEST_REGISTERS = 65536, 8, 24
#: How tiles of keys come: boxes that TMA copies, or rows that the lanes of a warp copy by cp.async, or load
#: to registers and store.
Copies: TypeAlias = Literal["boxes", "rows", "registers"]
#: Registers of a thread that copies rows, and how many it asks for at once, by the wider of D and Dv:
#: accumulators of wide heads leave it few.
_ROW_COPIES: tuple[tuple[int, int, int], ...] = ((192, 64, 12), (256, 40, 1))
#: The columns before those of each product of a sum, and its own.
Products: TypeAlias = tuple[tuple[int, int], ...]
#: How a tile of o leaves (`Sm90Layout.way_out`).
WayOut: TypeAlias = Literal["tile", "q", "v", ""]
#: Columns of q and k, and of v, that one accumulator can have.
WIDEST = 256
#: Bytes of what the swizzle of a tile repeats by, which tiles begin at a multiple of.
_SWIZZLED = 1024
#: Bytes of a barrier; of what is said of two tiles of queries, at most.
_BARRIER, _RECORDS = 8, 384
#: Bytes of shared memory that the system keeps for each block.
SYSTEM_BYTES = 1024
#: Bytes of what the blocks of a cluster tell each other.
_MAIL = 8
#: Threads at the named barrier of a turn: those of the warpgroup that takes it, and of the one before it.
TURN_THREADS = 256
#: Tiles of random numbers, a byte for each element, that dropout draws ahead.
DRAWN_TILES = 2
#: Registers of a thread that multiplies besides its accumulators: addresses, statistics, positions.
FREE_REGISTERS = 28
#: Registers that ptxas wants besides the result of one wgmma. A thread has to start with all of these,
#: whatever it takes later (C7602).
_BESIDE_RESULT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a config comes to. consumers: warpgroups; other_warpgroups: those of other roles; q_tiles: buffers
    of Q; o_tiles: of o, 0 or 1; overlap: whether q k^T of the next tile runs during the softmax of this one;
    pingpong: whether consumers take turns at issuing mma; blocks: that share a multiprocessor;
    producer_registers, consumer_registers: of a thread of the other roles, and of a consumer.
    """

    consumers: int
    other_warpgroups: int
    q_tiles: int
    o_tiles: int
    overlap: int
    pingpong: int
    blocks: int
    producer_registers: int
    consumer_registers: int

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.other_warpgroups)

    @property
    def entry_registers(self) -> int:
        return entry_registers(self.consumers, self.other_warpgroups, self.blocks)


def entry_registers(consumers: int, other_warpgroups: int = 1, blocks: int = 1) -> int:
    """Returns the registers of each thread at launch, for so many warpgroups that multiply and so many
    others; blocks: that share a multiprocessor.
    """
    return min(_REGISTERS // (128 * blocks * (consumers + other_warpgroups)) // _STEP * _STEP, 255)


def widest_product(entry: int) -> int:
    """Columns that the result of one wgmma can have where a thread starts with so many registers."""
    most = 2 * (entry - _BESIDE_RESULT)
    return min(most // MMA * MMA, WIDEST)


def cut_products(columns: int, widest: int) -> Products:
    """Cuts a sum into products whose results fit the registers that a thread starts with."""
    step = columns if columns <= widest else widest // PIECE * PIECE
    return tuple((first, min(step, columns - first)) for first in range(0, columns, step))


def swizzle_rows(columns: int, element: DType) -> Swizzle:
    """Returns tiles of rows of so many columns: whole pieces, as TMA copies them."""
    return Swizzle(width=-(-columns // PIECE) * PIECE, chunk=chunk_of(element))


def list_key_tiles(configs: Iterable[TileConfig]) -> list[int]:
    """Lists the keys of a tile under some config."""
    return sorted({config.tile_kv for config in configs})


def registers_left(consumers: int, registers: int, other_warpgroups: int = 1, blocks: int = 1) -> int:
    """Returns the registers that are left for a thread of a helper, if each thread that multiplies has so
    many.
    """
    held = entry_registers(consumers, other_warpgroups, blocks)
    left = (held * (consumers + other_warpgroups) - registers * consumers) // other_warpgroups
    return min(left, held) // _STEP * _STEP


def most_registers(consumers: int, other_warpgroups: int, helping: int, blocks: int) -> int:
    """Returns the most that a thread that multiplies can have, where one of a helper has `helping`."""
    held = entry_registers(consumers, other_warpgroups, blocks)
    return (held * (consumers + other_warpgroups) - helping * other_warpgroups) // consumers // _STEP * _STEP


def row_copies(width: int) -> tuple[int, int]:
    """Returns the registers of a thread that copies rows, and how many it asks for at once, beside heads of
    so many columns.
    """
    return next((registers, rows) for widest, registers, rows in _ROW_COPIES if width <= widest)


def hopper(config: TileConfig) -> HopperConfig:
    """Returns the config as this target's. TypeError for one of another target, or of a backward."""
    if not isinstance(config, HopperConfig):
        raise TypeError(f"not a config of wgmma: {config!r}")
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Layout(CudaLayout):
    """As for `CudaLayout`; tiles are as wide as their pieces. by_tma: whether o may leave by TMA, which
    writes whole boxes; room: bytes of shared memory of a block. vectors: loads with a value for each key,
    which come through shared memory; pair: bytes of a value that is loaded for each query and key,
    pair_stages: tiles of them in shared memory, 0: none; draws: whether a warpgroup draws what dropout keeps;
    columns: terms of the score that tensor cores add (`scores`), key_columns: those of numbers of keys;
    columns_factor: what they are divided by. capped: whether scores are by a polynomial where they are small
    (`softcap`). packed: whether sequences are, whose tiles are claimed at once. copies: how keys come.
    clusters: whether some config has blocks that share tiles of K and V. shares: whether blocks share a
    multiprocessor under some config. pingpong: whether warpgroups take
    turns at issuing products under some config. overlap: whether q k^T of the next tile runs during the
    softmax of this one, None: under some configs. narrow: what a warpgroup of its own copies and converts.
    keeps_sums: whether the sums of segments so far lie in shared memory (`order`). boxes_rows: whether TMA
    copies rows that the epilogue loads, to the tile of o.
    """

    by_tma: bool
    room: int
    vectors: int
    pair: int = 0
    pair_stages: int = 0
    draws: bool
    columns: int
    key_columns: int
    columns_factor: float
    capped: bool
    packed: bool
    copies: Copies
    clusters: bool
    shares: bool
    pingpong: bool
    overlap: bool | None
    narrow: Narrow
    keeps_sums: bool
    boxes_rows: bool = False

    @property
    def fewest_registers(self) -> int:
        if self.narrow:
            return CONVERTING_REGISTERS
        return row_copies(max(self.d, self.dv))[0] if self.copies == "rows" else FEWEST_REGISTERS

    @property
    def rows_at_once(self) -> int:
        return row_copies(max(self.d, self.dv))[1]

    @property
    def work_bytes(self) -> int:
        return _RECORDS

    @property
    def turn_threads(self) -> int:
        return TURN_THREADS

    @property
    def copies_rows(self) -> bool:
        return self.copies == "rows"

    @property
    def other_warpgroups(self) -> int:
        return 1 + self.draws + bool(self.narrow)

    def chosen(self, config: TileConfig) -> dict[str, int]:
        shape = self.shape(config)
        chosen = {
            "Q_TILES": shape.q_tiles,
            "O_TILES": shape.o_tiles,
            "PRODUCER_REGISTERS": shape.producer_registers,
            "CONSUMER_REGISTERS": shape.consumer_registers,
        }
        chosen |= {"OVERLAP": shape.overlap} if self.overlap is None else {}
        chosen |= {"CLUSTER": hopper(config).cluster} if self.clusters else {}
        chosen |= {"BLOCKS": shape.blocks} if self.shares else {}
        chosen |= {"RAW_TILES": self.ahead(config)} if self.narrow else {}
        return chosen | ({"PINGPONG": shape.pingpong} if self.pingpong else {})

    def shape(self, config: TileConfig) -> Shape:
        """Returns the most buffers that fit: first another tile of Q, then one of o."""
        chosen = hopper(config)
        consumers, registers = chosen.tile_q // WGMMA_ROWS, chosen.registers
        buffers = [(2, 1), (2, 0), (1, 1), (1, 0)] if self.by_tma else [(2, 0), (1, 0)]
        q_tiles, o_tiles = next(
            (
                pair
                for pair in buffers
                if sum(self._buffers(config, *pair, FEWEST_AHEAD).values()) <= self.room_of(chosen.blocks)
            ),
            buffers[-1],
        )
        return Shape(
            consumers=consumers,
            other_warpgroups=self.other_warpgroups,
            q_tiles=q_tiles,
            o_tiles=o_tiles,
            overlap=int(chosen.overlap),
            pingpong=int(chosen.pingpong),
            blocks=chosen.blocks,
            producer_registers=registers_left(consumers, registers, self.other_warpgroups, chosen.blocks),
            consumer_registers=registers,
        )

    def room_of(self, blocks: int) -> int:
        """Bytes of shared memory of a block, where so many share a multiprocessor."""
        return self.room if blocks == 1 else DEVICES["sm_90"].shared_per_sm // blocks - SYSTEM_BYTES

    def way_out(self, config: TileConfig) -> WayOut:
        """Returns how o leaves: by TMA through a "tile" of its own where there is room for one; else through
        its rows of Q where there is another Q, or through the tiles of V, as many pieces through each as it
        has room for; "" from registers.
        """
        shape, pieces = self.shape(config), self.v.width // PIECE
        if not self.by_tma:
            return ""
        if shape.o_tiles:
            return "tile"
        if shape.q_tiles > 1:
            return "q" if self.v.width <= self.qk.width else ""
        of_a_tile = config.tile_kv * pieces // config.tile_q
        return "v" if of_a_tile and -(-pieces // of_a_tile) <= config.stages else ""

    def list_products(self, configs: Iterable[TileConfig]) -> Products:
        """Lists the products of p v, which fit the registers of every config."""
        held = min(self.shape(config).entry_registers for config in configs)
        return cut_products(self.dv_multiplied, widest_product(held))

    def threads(self, config: TileConfig) -> int:
        return self.shape(config).threads

    def shared_memory(self, config: TileConfig) -> dict[str, int]:
        shape = self.shape(config)
        return self._buffers(config, shape.q_tiles, shape.o_tiles, self.ahead(config))

    def ahead(self, config: TileConfig) -> int:
        """Tiles of 8 bits in shared memory: as many as there is room for."""
        shape = self.shape(config)
        others = sum(self._buffers(config, shape.q_tiles, shape.o_tiles, 0).values())
        room = self.room_of(shape.blocks)
        return self.narrow.count_ahead(config.tile_kv, [room - others]) if self.narrow else 0

    def barriers(self, config: TileConfig) -> dict[str, int]:
        """Barriers by what they guard: a full and an empty one of each buffer; o that leaves through V has an
        empty one alone.
        """
        stages = config.stages
        of_keys = {"k": 2 * stages, "v": 2 * stages}
        loaded = {"vectors": 2 * stages} if self.vectors else {}
        drawn = {"drawn": 2 * DRAWN_TILES} if self.draws else {}
        pairs = {"pairs": 2 * self.pair_stages} if self.pair_stages else {}
        leaving = {"o": 1} if self.way_out(config) == "v" else {}
        shape = self.shape(config)
        rows = {"rows of the epilogue": self._row_barriers(config, shape.o_tiles)} if self.boxes_rows else {}
        told = {"cluster": 1} if self.clusters else {}
        told |= {"8 bits": self.ahead(config) * self.narrow.barriers} if self.narrow else {}
        of_queries = {
            "query tiles": 4 + (config.longest_first and not self.packed),
            "q": 2 * shape.q_tiles,
        }
        return {**of_queries, **of_keys, **loaded, **drawn, **pairs, **leaving, **rows, **told}

    def _row_barriers(self, config: TileConfig, o_tiles: int) -> int:
        """Counts barriers of boxes of rows for the epilogue, one for each warp that multiplies."""
        return self.boxes_rows * o_tiles * config.tile_q // MMA

    def registers(self, config: TileConfig) -> dict[str, int]:
        tile_kv = config.tile_kv
        p = {"p": tile_kv // 4} if hopper(config).overlap else {}
        return {"acc": self.dv_multiplied // 2, "s": tile_kv // 2, **p}

    def _buffers(self, config: TileConfig, q_tiles: int, o_tiles: int, ahead: int) -> dict[str, int]:
        tile_q, tile_kv, stages = config.tile_q, config.tile_kv, config.stages
        size = self.element.bytes
        of_stages, columns = 6, stages if self.key_columns else bool(self.columns)
        pair_pieces = -(-tile_kv * self.pair // PIECE_BYTES)
        buffers = {
            "columns": -(-columns * tile_kv * COLUMN_BYTES // _SWIZZLED) * _SWIZZLED,
            "q": q_tiles * tile_q * self.qk.width * size,
            "k": stages * tile_kv * self.qk.width * size,
            "v": stages * tile_kv * self.v.width * size,
            "o": o_tiles * tile_q * self.v.width * size,
            "sums": self.keeps_sums * tile_q * self.dv_multiplied * 4,
            "8 bits": ahead * self.narrow.tile_bytes(tile_kv),
            "pairs": self.pair_stages * tile_q * pair_pieces * PIECE_BYTES,
            "vectors": self.vectors * stages * tile_kv * 4,
            "drawn": self.draws * DRAWN_TILES * tile_q * tile_kv,
            "barriers": _BARRIER
            * (
                6
                + 2 * q_tiles
                + of_stages * stages
                + 2 * DRAWN_TILES * self.draws
                + 2 * self.pair_stages
                + ahead * self.narrow.barriers
                + self._row_barriers(config, o_tiles)
            )
            + _RECORDS
            + self.clusters * (_BARRIER + _MAIL),
        }
        return {name: bytes for name, bytes in buffers.items() if bytes}


def beyond_shared_memory(shared: Mapping[str, int], room: int) -> str | None:
    """Returns why a block cannot have so many bytes, by what they hold; None where it can."""
    if sum(shared.values()) <= room:
        return None
    parts = " + ".join(f"{name} {size}" for name, size in shared.items())
    return f"needs {sum(shared.values())} B of shared memory ({parts}); the limit is {room} B"
