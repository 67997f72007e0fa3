"""How a decode kernel of Hopper lies on the machine: tiles, barriers, registers (`sm90.decode` says why)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from attnc.expr.construct import ZERO
from attnc.model.schedule import TileConfig
from attnc.plan.device import DEVICES
from attnc.plan.ir import Decode, Let
from attnc.plan.regions import guard_of
from attnc.plan.sm80.layout import MMA, CudaLayout, round_up_depth
from attnc.plan.sm90.layout import SYSTEM_BYTES, WGMMA_ROWS, Copies, Products, cut_products, widest_product
from attnc.plan.sm90.narrow import Narrow

#: Registers of a thread that copies, and of one that multiplies, by the number of warpgroups that multiply:
#: all that the launch holds, exactly, with as many blocks on a multiprocessor as `BLOCKS` says.
REGISTERS: Mapping[int, tuple[int, int]] = {1: (40, 216), 2: (40, 232)}
#: The same where those that copy convert, too.
CONVERTING_REGISTERS: Mapping[int, tuple[int, int]] = {1: (48, 208), 2: (48, 208)}
BLOCKS: Mapping[int, int] = {1: 2, 2: 1}
#: Columns of a product where two warpgroups convert, and a thread starts with 128 registers.
EVEN_PART = 128
#: As `some_splits` and `many_rows` say: three such blocks live on a multiprocessor, of 132. Measured on an
#: H200. Part of kernels, which find their rows by it as the host counts their blocks: with fewer
#: multiprocessors (114 of an H100 PCIe, 78 of an H20) a few more joins have a block for each row than suit.
SOME_SPLITS, MANY_ROWS = (12, 48), 3 * 132
#: Bytes of a row of a piece of a tile, of a barrier, and of what a warp tells others by itself.
_ROW, _BARRIER, _WORD = 128, 8, 16
#: Barriers of two warpgroups with three stages, and some more.
_MOST_BARRIERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90DecodeLayout(CudaLayout):
    """As for `CudaLayout`; tiles are as wide as their pieces.

    consumers: warpgroups that multiply; by_rows: each has 64 rows of its own; shares: blocks of some config
    share the columns of o; page: keys that lie one behind the other in memory, 0: all; copies: how keys come;
    room: bytes of shared memory of a block; narrow: what is converted; in_order: sums are those of an
    absolute order (`sm90.order`); joined: columns of keys that are of another input, behind those of k;
    overlaps: p v of a tile runs beside the softmax of the next one; walks_again: a block whose lazy maximum
    has failed in some row walks over its keys again, under a running one; few_splits: up to which one
    group of threads joins those of a row, of any number of rows; 0: a block always does. unites: rows are of
    queries that walk together over blocks of their lists.
    """

    consumers: int
    by_rows: bool
    shares: bool
    page: int
    copies: Copies
    room: int
    narrow: Narrow
    in_order: bool
    joined: int
    overlaps: bool
    walks_again: bool
    few_splits: int
    unites: bool

    @property
    def by_warps(self) -> bool:
        return False

    @property
    def copies_rows(self) -> bool:
        return self.copies == "rows"

    @property
    def gathers(self) -> bool:
        return self.copies == "registers"

    @property
    def copies_generically(self) -> bool:
        """Whether rows come through the generic proxy, after which those that multiply need a fence."""
        return self.copies_rows or self.gathers

    @property
    def mapped(self) -> tuple[str, ...]:
        return () if self.copies != "boxes" else ("k",) if self.v_in_k else ("k", "v")

    @property
    def joining_blocks(self) -> str:
        if not self.few_splits:
            return "rows"
        groups = f"config.WARPS * 128 // {self.split_columns}"  # of threads that read a split
        few, some = (f"({most + 1} > SPLITS) * (rows > {self.many_rows})" for most in self.some_splits)
        few = f"max({self.few_splits + 1} > SPLITS, {few})"
        return f"cdiv(rows, 1 + {few} * ({groups} - 1) + (1 - {few}) * {some} * ({groups} // 3 - 1))"

    @property
    def some_splits(self) -> tuple[int, int]:
        """Splits of many rows up to which one group of threads, and three, join those of each."""
        return SOME_SPLITS

    @property
    def many_rows(self) -> int:
        """Rows whose splits have a block each, at once."""
        return MANY_ROWS

    @property
    def join_bytes(self) -> int:
        """Shared memory of a warp that joins splits: sums, and statistics of groups of threads."""
        return 32 * 16 + (64 if self.few_splits else 0)

    @property
    def shares_columns(self) -> bool:
        return self.consumers == 2 and not self.by_rows

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return WGMMA_ROWS * (self.consumers if self.by_rows else 1)

    @property
    def sharing(self) -> int:
        """Warpgroups that share the columns of o."""
        return 1 if self.by_rows else self.consumers

    @property
    def dv_multiplied(self) -> int:
        return 2 * round_up_depth(-(-self.dv // 2)) if self.splits_keys else round_up_depth(self.dv)

    @property
    def overlaps_columns(self) -> bool:
        """Whether the last piece of v of the first warpgroup begins columns of the other one, too."""
        return self.splits_keys and self.dv_multiplied < self.v.width

    @property
    def split_columns(self) -> int:
        return self.dv_multiplied

    @property
    def stores_half(self) -> bool:
        return self.dv < self.dv_multiplied

    @property
    def keeps_rest(self) -> bool:
        """Whether columns of q that multiply no values stay in registers. Where two warpgroups convert they
        have the registers.
        """
        return self.shares_columns and self.rest > 0 and not self.gathers

    @property
    def values_reach(self) -> bool:
        """Whether values have some of the columns of another input, behind those of k."""
        return self.v_in_k and self.dv > self.d - self.joined

    @property
    def copying(self) -> int:
        """Warpgroups that copy: two where they convert by way of registers."""
        return 2 if self.gathers else 1

    @property
    def blocks(self) -> int:
        return BLOCKS[self.consumers]

    @property
    def role_registers(self) -> tuple[int, int]:
        return self.registers_of(self.consumers)

    def list_products(self, configs: Iterable[TileConfig]) -> list[Products]:
        """Lists the products of p v, for each number of columns that a block of some config has."""
        widths = dict.fromkeys(map(self.columns, configs))
        if self.gathers:  # as `PRODUCT` in the text: two even parts of the most columns
            return [
                cut_products(columns, columns if columns % EVEN_PART else EVEN_PART) for columns in widths
            ]
        return [cut_products(columns, widest_product(self.entry_registers)) for columns in widths]

    def sharers(self, config: TileConfig) -> int:
        return self.dv // config.tile_d if self.shares else 1

    def chosen(self, config: TileConfig) -> dict[str, int]:
        columns = {"BLOCK_D": config.tile_d} if self.shares else {}
        ahead = self.ahead(config)
        return columns | ({"RAW_TILES": ahead} if ahead else {})

    def ahead(self, config: TileConfig) -> int:
        """Tiles of 8 bits in shared memory: as many as leave room for the other blocks of a multiprocessor,
        or else for this one.
        """
        if not self.narrow or self.gathers:
            return 0
        others = sum(size for name, size in self._buffers(config, 0).items())
        own = DEVICES["sm_90"].shared_per_sm // BLOCKS.get(self.consumers, 1) - SYSTEM_BYTES
        return self.narrow.count_ahead(config.tile_kv, (own - others, self.room - others))

    def registers_of(self, consumers: int) -> tuple[int, int]:
        return (CONVERTING_REGISTERS if self.narrow else REGISTERS)[consumers]

    def columns(self, config: TileConfig) -> int:
        return self.dv_multiplied // self.sharing // self.sharers(config)

    @property
    def rows_at_once(self) -> int:
        return 4

    @property
    def rest(self) -> int:
        return self.qk.panels - self.v.panels if self.v_in_k else 0

    @property
    def rest_steps(self) -> int:
        return (self.d_multiplied - self.dv) // MMA if self.rest else 0

    @property
    def groups(self) -> int:
        """Parts of a stage that are copied, waited for and given back each by itself: K, if V is not in it,
        and V; or the columns of V that either warpgroup multiplies, and K in two parts.
        """
        return self.sharing + (0 if self.v_in_k else self.sharing)

    @property
    def splits_keys(self) -> bool:
        return self.shares_columns and not self.v_in_k

    @property
    def tile_room(self) -> int:
        return self.room - WGMMA_ROWS * _ROW - self.statistic_bytes - _BARRIER * _MOST_BARRIERS

    @property
    def statistic_bytes(self) -> int:
        return (10 if self.in_order else 2 if self.sums_in_p else 4) * WGMMA_ROWS * 4

    @property
    def sums_in_p(self) -> bool:
        """Whether sums of rows take the place of the last p."""
        return self.gathers and not self.in_order

    def key_stages(self, config: TileConfig) -> int:
        """Tiles of K in shared memory: one where there is no room for as many as of V."""
        rows = WGMMA_ROWS * self.qk.panels + config.stages * config.tile_kv * (self.qk.panels + self.v.panels)
        return 1 if self.splits_keys and rows * _ROW > self.tile_room else config.stages

    @property
    def first_panels(self) -> int:
        return (self.qk.panels + 1) // 2

    def box(self, tile_kv: int) -> int:
        keys = tile_kv // self.narrow.warps
        return gcd(self.page, keys) if self.page else keys

    def threads(self, config: TileConfig) -> int:
        return 128 * (self.consumers + self.copying)

    @property
    def entry_registers(self) -> int:
        return 65536 // (128 * (self.consumers + self.copying) * BLOCKS[self.consumers]) // 8 * 8

    @property
    def consumer_registers(self) -> int:
        return self.registers_of(self.consumers)[1]

    def barriers(self, config: TileConfig) -> dict[str, int]:
        """Barriers by what they guard: a full and an empty one of each part of a stage."""
        return self._barriers(config, self.ahead(config))

    def _barriers(self, config: TileConfig, ahead: int) -> dict[str, int]:
        found = {"keys": 2 * config.stages * self.groups, **({"p": 2} if self.shares_columns else {})}
        found |= {"walks": 1} if self.walks_again else {}
        return found | ({"8 bits": ahead * self.narrow.barriers} if ahead else {})

    def shared_memory(self, config: TileConfig) -> dict[str, int]:
        return self._buffers(config, self.ahead(config))

    def _buffers(self, config: TileConfig, ahead: int) -> dict[str, int]:
        tile_kv, stages = config.tile_kv, config.stages
        buffers = {
            "q": self.rows * self.qk.panels * _ROW,
            "k": self.key_stages(config) * tile_kv * self.qk.panels * _ROW,
            "v": 0 if self.v_in_k else stages * tile_kv * self.v.panels * _ROW,
            "8 bits": ahead * self.narrow.tile_bytes(tile_kv),
            "scales": 0 if self.gathers else self.narrow.scale_bytes(tile_kv),
            "p": WGMMA_ROWS * _ROW if self.shares_columns else 0,
            "statistics": self.statistic_bytes if self.shares_columns else 0,
            "failures": 4 * self.consumers * _WORD if self.walks_again else 0,
            "barriers": _BARRIER * sum(self._barriers(config, ahead).values()),
        }
        return {name: size for name, size in buffers.items() if size}

    def registers(self, config: TileConfig) -> dict[str, int]:
        tile_kv = config.tile_kv
        kept = {"q": 4 * self.rest_steps} if self.keeps_rest else {}
        return {"acc": self.columns(config) // 2, "s": tile_kv // 2, "p": tile_kv // 4, **kept}


def knows_first_tile(kernel: Decode) -> bool:
    """Returns whether the first tile of a block depends on no length or condition, so that it is copied, or
    the pages of its rows are looked up, before any is known.
    """
    split, rows = kernel.split, kernel.rows.get("k")
    first = kernel.regions.loops[0].start if split is None else split.lo
    is_packed = rows is not None and rows.first is not None
    is_run = split is not None and not split.in_turn  # its beginning follows from how many tiles there are
    is_known = first == ZERO and not is_run and guard_of(kernel.regions) is None
    return is_known and not is_packed and "N" in kernel.dims


def shows_unseen_values(kernel: Decode, layout: Sm90DecodeLayout) -> bool:
    """Returns whether rows of v in a partial tile have to be made zero: TMA does so behind the tensor alone,
    and copies of single rows behind the last key.
    """
    shortened = any(isinstance(item, Let) and item.name == "N" for item in kernel.program)
    return kernel.step.kept is not None or (shortened and layout.copies == "boxes")
