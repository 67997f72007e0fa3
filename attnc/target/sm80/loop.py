"""The loop over tiles of a CUDA kernel, forward or backward: its bounds, which tiles are partial, and which
of their keys any query keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.model.dtypes import DType
from attnc.plan.ir import Kernel, Statement
from attnc.plan.regions import guard_of, partial_test
from attnc.plan.steps import fetches_for, kept_fetches
from attnc.target.sm80.printer import local, scalar, statement
from attnc.target.terms import minus, plus

#: Words for 32 blocks that queries list together: a bit and a byte for each.
WORDS_OF_UNION = 1 + 8


def _size_of(kernel: Kernel) -> str:
    return "BLOCK_N" if kernel.regions.axis == "kv" else "BLOCK_M"


def loop_of(kernel: Kernel, dtypes: dict[str, DType], *, fills: bool = True) -> TileLoop:
    """Returns the loop of a kernel, from each tile to the one behind it."""
    return TileLoop(kernel=kernel, dtypes=dtypes, step=_size_of(kernel), fills=fills)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLoop:
    """One `for` over the tiles of all regions. end: of the tiles that the block visits; step: from one to the
    next; fills: whether copied tiles hold zeros where no query keeps a key; ascends: whether the first tile
    comes first, where tiles are those of listed blocks; descends: whether a decode kernel begins with the
    last.
    """

    kernel: Kernel
    dtypes: dict[str, DType]
    step: str
    end: str = "hi"
    fills: bool = True
    ascends: bool = True
    descends: bool = False

    @property
    def lo(self) -> str:
        return scalar(self.kernel.regions.loops[0].start)

    @property
    def hi(self) -> str:
        return scalar(self.kernel.regions.loops[-1].stop)

    def descend(self) -> TileLoop:
        return replace(self, step="-BLOCK_N", descends=True)

    @property
    def first(self) -> str:
        start, step = self.lo, self.step
        if self.descends:
            start = f"({self.end} - 1) / BLOCK_N * BLOCK_N"
        before = plus(start, "BLOCK_N") if self.descends else minus(start, step)
        found = f"next({before})" if self.skips else start
        return f"{self.end} > {self.lo} ? {found} : {self.before_first}" if self.descends else found

    @property
    def before_first(self) -> str:
        """Where a walk that descends ends: a tile before the first one."""
        return minus(self.lo, "BLOCK_N")

    @property
    def more(self) -> str:
        return f"{self.index} >= {self.lo}" if self.descends else f"{self.index} < {self.end}"

    @property
    def limit(self) -> str:
        return self.lo if self.descends else self.end

    @property
    def visits(self) -> str:
        return "kv_lo >= end" if self.descends else "kv_lo < end"

    @property
    def bounds(self) -> list[str]:
        """Statements that find where the tiles of each region begin and end."""
        found = [statement(item, self.dtypes, (), scalar) for item in self.kernel.regions.bounds]
        ends = self.end == "hi" and self.hi != "hi"
        return [*found, *([f"const int hi = {self.hi};"] if ends else [])]

    @property
    def index(self) -> str:
        return f"{self.kernel.regions.axis}_lo"

    @property
    def last_of_tile(self) -> str:
        """A declaration of the last query, or key, of the tile at hand."""
        if self.kernel.regions.axis == "kv":
            return local("const int", kv_hi="min(kv_lo + BLOCK_N, N) - 1")
        return local("const int", q_hi="min(q_lo + BLOCK_M, M) - 1")

    @property
    def tested(self) -> list[str]:
        """Statements that the guard of a tile reads."""
        return [statement(item, self.dtypes, (), scalar) for item in self.tests]

    @property
    def captures(self) -> str:
        return "[]" if self.step == _size_of(self.kernel) and not self.listed else "[&]"

    @property
    def goes_on(self) -> str:
        """What leads from a tile to the one behind it, before anything is known of that."""
        return f"= {self.behind}" if self.listed else f"+= {self.step}"

    @property
    def behind(self) -> str:
        if self.listed:
            return f"next_listed(args.{self.bits}_ptr, list_line, {self.listed}, {self.index})"
        return f"{self.index} {'- BLOCK_N' if self.descends else f'+ {self.step}'}"

    @property
    def return_if_all_seen(self) -> list[str]:
        """Statements that leave a tile alone all of whose keys some query sees, if any is known to be one."""
        if self.keeps and self.masked == "true":
            return []
        full = "!is_partial(kv_lo)" if self.keeps else f"kv_lo + BLOCK_N <= {self.end_of_kept}"
        return [f"if ({full})", "    return;"]

    @property
    def tests(self) -> tuple[Statement, ...]:
        return self.kernel.regions.tests

    @property
    def masked(self) -> str:
        return scalar(partial_test(self.kernel.regions))

    @property
    def guard(self) -> str:
        guard = guard_of(self.kernel.regions)
        return "" if guard is None else scalar(guard)

    @property
    def listed(self) -> str:
        """Words of a list as bits, "" where tiles are not those of such lists."""
        walk = self.kernel.regions.loops[0].listed
        return "" if walk is None or not walk.memory.endswith("bits") else scalar(walk.stride)

    @property
    def listed_block(self) -> int:
        walk = self.kernel.regions.loops[0].listed
        return 0 if walk is None else walk.block

    @property
    def knows_full(self) -> bool:
        walk = self.kernel.regions.loops[0].listed
        return walk is not None and walk.knows_full

    @property
    def line(self) -> str:
        """The number of a list, times what it has for 32 blocks: a word of bits, and a second one of full
        blocks, or bytes of blocks.
        """
        walk = self.kernel.regions.loops[0].listed
        if walk is not None and walk.queries > 1:
            return f"{WORDS_OF_UNION}ll * line"
        return "2ll * line" if self.knows_full else "(long long)line"

    @property
    def members(self) -> str:
        """Where the bytes of the blocks of a list are, "" where a tile has one query's."""
        walk = self.kernel.regions.loops[0].listed
        if walk is None or walk.queries == 1:
            return ""
        words = f"({self.listed})"
        at = f"{self.line.replace('line', 'max(list_line, 0)')} * {words} + {words}"
        return f"(const unsigned char*)(args.{self.bits}_ptr + {at})"

    def hides_some(self, at: str) -> str:
        """Returns what tells whether a tile of listed blocks is partial."""
        return f"hides_some_of(args.{self.bits}_ptr, list_line, {self.listed}, {at})"

    @property
    def bits(self) -> str:
        walk = self.kernel.regions.loops[0].listed
        return "" if walk is None else f"_{walk.memory}"

    @property
    def skips(self) -> bool:
        return bool(self.guard or self.listed)

    @property
    def end_of_kept(self) -> str:
        """Where zeros begin in a copied tile that must not hold what no query keeps: at the end of the loop,
        where a condition for them ends it.
        """
        step, over_keys = self.kernel.step, self.kernel.regions.axis == "kv"
        return self.end if over_keys and step.kept != step.kept_inside else "N"

    @property
    def keeps(self) -> str:
        return ", keeps" if self.fills and self.kernel.step.kept_inside is not None else ""

    @property
    def kept(self) -> str:
        assert self.kernel.step.kept_inside is not None
        return scalar(self.kernel.step.kept_inside)

    @property
    def kept_values(self) -> list[str]:
        assert self.kernel.step.kept_inside is not None
        fetches = fetches_for(kept_fetches(self.kernel), self.kernel.step.kept_inside)
        return [statement(fetch, self.dtypes, (), scalar) for fetch in fetches]

    def unless_partial(self, next_tile: str) -> list[str]:
        """Returns statements that keep all keys of a full tile, if that is sooner known than which are kept.
        next_tile: its first key, "" where that is not at hand.
        """
        if not next_tile or self.kernel.regions.axis == "q" or self.masked == "true" or not self.kept_values:
            return []
        return [f"const int kv_lo = {next_tile};", f"if (!({self.masked}))", "    return true;"]
