"""Masks that list blocks of keys: `listed(idx, rows = R, keys = K) and rest`.

The list becomes a walk: a tile of queries visits the blocks of its list, and the rest of the mask says, as
ever, which of these tiles are partial. Whatever a list holds, a kernel first makes of it the blocks that it
names, each once and ascending: no key counts twice, and sums have one order. Where gradients are wanted,
another one inverts the lists, so that a tile of keys visits the blocks of queries that name it. Nothing is
added in memory, and the host looks at no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TypeVar

from attnc.expr.construct import ZERO, add, compare, conj, disj, floordiv, minimum, mul, where
from attnc.expr.interval import SIZE
from attnc.expr.nodes import And, Binary, Const, Dim, Expr, Index, InList, Load, Ref, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Knob, Phase, Schedule, TileConfig
from attnc.model.tensors import Ragged, Role
from attnc.plan.ir import Axis, Let, Loop, Regions
from attnc.plan.ir.list_making import KeptBlocks, ListMaking
from attnc.plan.ir.lists import ListWalk, Memory
from attnc.plan.loads import is_nonnegative
from attnc.plan.regions import LENGTH, START, partial_test
from attnc.plan.signature import feature, group_in_words, longest
from attnc.plan.steps import Q_ROWS, names_of, needed_for
from attnc.plan.width import ends_of

C = TypeVar("C", bound=TileConfig)
_Q_IDX, _KV_IDX = Index("q_idx"), Index("kv_idx")
_ONE = Const(1)
#: Queries, or keys, of a warpgroup.
WARPGROUP = 64
#: Keys of the smallest tile.
LEAST_TILE = 16
#: The K/V head of a query head, and of the rows of a tile that has all query heads of it.
GROUP, KV_HEAD = Binary("//", Index("h"), Dim("G")), Ref("h_kv", "int", natural=True)
#: Keys and columns of what a query gives to gradients of single keys that it selects, of which a product is
#: made; tiles of weights that are on their way, while rows of do and q stay.
PRODUCT_KEYS, PRODUCT_COLUMNS, PRODUCT_STAGES = 64, 128, 3
#: What the lists are called that no caller passes: of the blocks that a mask keeps a pair of.
KEPT_BLOCKS = "_kept_blocks"
#: Whether the mask keeps not all pairs of the tile at hand, which is one of such a list.
HIDES_SOME = Ref("hides_some", "bool")
#: The number of a tile of queries, and one of these, in its sequence and among all packed rows.
TILE = Ref("tile", "int", natural=True)
QUERY = Ref("query", "int", natural=True, within=(0, SIZE))
QUERY_ROW = Ref("query_row", "int", natural=True, within=(0, SIZE))
#: Keys that the list of a program names.
LIST_LENGTH = Ref("list_length", "int", natural=True)
#: Blocks that it names, where they are numbers.
LISTED = Ref("listed", "int")
#: Weights that gradients keep of the keys that queries list, at a time: 512 MiB.
KEPT = 1 << 28
#: Blocks of keys of the longest sequence, and blocks of queries that a list can be of; of the whole call.
BLOCKS, LIST_ROWS = Dim("list_blocks"), Dim("list_rows")


@dataclass(frozen=True, slots=True)
class Listing:
    """A mask that lists blocks: the condition, and what stands beside it. is_shortened: a length cuts off
    queries, so that M is not how many there are lists of.
    """

    condition: InList
    rest: Expr
    is_shortened: bool

    @property
    def sizes(self) -> tuple[Expr, ...]:
        *sizes, _ = self.condition.extents
        return tuple(Q_ROWS if self.is_shortened and size == Dim("M") else size for size in sizes)

    @property
    def keys(self) -> int:
        return self.condition.keys

    @property
    def knows_full(self) -> bool:
        """Whether lists say of which blocks the rest of the mask keeps all pairs."""
        return self.condition.tensor == KEPT_BLOCKS

    @property
    def gathers(self) -> bool:
        """Whether blocks are smaller than tiles can be, or no multiple of them: tiles are gathered from
        several.
        """
        return self.keys % LEAST_TILE != 0

    @property
    def row_axis(self) -> int | None:
        found = [axis for axis, index in enumerate(self.condition.indices) if reads_row(index)]
        return found[0] if found else None

    @property
    def rows(self) -> int:
        if self.row_axis is None:
            return 0
        return block_of_rows(self.condition.indices[self.row_axis]) or 0


def listing_of(attention: Attention) -> Listing | None:
    """Returns the list of the mask, apart from the rest of the mask; None if the mask has no list, or has one
    that no walk could follow (`refuse_lists`).
    """
    if not _lists(attention.mask):
        return None
    mask = substitute(attention.mask, group_in_words(attention))
    conjuncts = mask.operands if isinstance(mask, And) else (mask,)
    listed = [conjunct for conjunct in conjuncts if isinstance(conjunct, InList)]
    if len(listed) != 1:
        return None
    rest = conj(*(conjunct for conjunct in conjuncts if conjunct is not listed[0]))
    shortened = "M" in attention.lengths
    return Listing(listed[0], replace(rest, span=attention.mask.span), is_shortened=shortened)


def _lists(mask: Expr) -> bool:
    return any(map(_lists, mask.operands)) if isinstance(mask, And) else isinstance(mask, InList)


def without_list(attention: Attention) -> Attention:
    """Returns the attention with the rest of the mask alone, where that lists blocks."""
    listing = listing_of(attention)
    return attention if listing is None else replace(attention, mask=listing.rest)


def selects_keys(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether the query heads of a K/V head share tiles, all of one query, which has a list."""
    listing = listing_of(attention)
    return listing is not None and listing.rows > 0 and packs_heads(schedule)


def walks_packed_lists(attention: Attention) -> bool:
    """Returns whether packed queries walk over blocks of keys, by a list of each, or over single keys that
    are not packed.
    """
    listing = listing_of(attention)
    if listing is None or not attention.q.storage.is_packed:
        return False
    return listing.rows > 0 and not (listing.gathers and attention.k.storage.is_packed)


def lists_packed_rows(attention: Attention) -> bool:
    """Returns whether lists are counted along the rows of all packed sequences, not those of each."""
    listing = listing_of(attention)
    if listing is None or listing.row_axis is None:
        return False
    return any(isinstance(node, Load) for node in walk(listing.condition.indices[listing.row_axis]))


def adds_to_keys(attention: Attention) -> bool:
    """Returns whether queries that select single keys, or a few, by lists of their own have gradients of
    these keys, which are summed in memory.
    """
    listing = listing_of(attention)
    if listing is None or not listing.rows or not listing.gathers:
        return False
    return bool({"k", "v"} & {*attention.grads})


def adds_as_it_comes(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether these sums are atomic: the schedule asks for it."""
    ways = [knob.choices for knob in sums_of_keys(schedule).values()]
    return adds_to_keys(attention) and ("atomic",) in ways


def sums_of_keys(schedule: Schedule) -> Mapping[str, Knob]:
    knobs = schedule.phases["backward"]
    return {key: knobs[key] for key in ("accumulate.dk", "accumulate.dv") if key in knobs}


def lists_blocks(attention: Attention) -> bool:
    """Returns whether the mask has a list anywhere."""
    return any(isinstance(node, InList) for node in walk(attention.mask))


def reads_row(index: Expr) -> bool:
    return any(isinstance(node, Index) and node.name in ("q_idx", "q_pos") for node in walk(index))


def block_of_rows(index: Expr) -> int | None:
    match index:
        case Index(name="q_idx"):
            return 1
        case Binary(op="//", left=Index(name="q_idx"), right=Const(value=int() as rows)):
            return rows
        case Binary(op="+", left=Load(), right=Index(name="q_idx")):
            return 1  # of packed queries
        case Binary(op="//", left=of_row, right=Const(value=1)):
            return block_of_rows(of_row)
        case _:
            return None


# --- the walk


def along_lists(
    loops: Regions,
    listing: Listing | None,
    axis: Axis,
    *,
    packs: bool = False,
    bits: bool = False,
    gathers: bool = False,
    queries: int = 1,
) -> Regions:
    """Returns the loops over tiles of `axis` as one walk over listed blocks, in which tiles outside of the
    ranges of the rest of the mask are partial: nothing of them is kept. packs: a tile has all query heads of
    a K/V head. bits: the loops stay as they are, and tiles that are in no listed block are skipped. gathers:
    tiles are gathered from several blocks, also where they could divide one. queries: of a tile, each with a
    list, which walk together over the blocks that any of them lists.
    """
    if listing is None:
        return loops
    condition, row_axis = listing.condition, listing.row_axis
    extents = condition.extents
    if axis == "kv":
        line = TILE if queries > 1 else _number(_of_queries(listing, packs=packs), listing.sizes)
        stride, block = add(extents[-1], _ONE), listing.keys
    else:
        at = _heads_at(packs=packs)
        others = [n for n in range(len(condition.indices)) if n != row_axis]
        heads = [substitute(condition.indices[n], at) for n in others]
        group = _number(heads, [listing.sizes[n] for n in others])
        here = floordiv(START["kv"], Const(listing.keys))
        line = add(mul(group, BLOCKS), here)
        line = line if is_nonnegative(group) else where(compare("<", group, ZERO), Const(-1), line)
        stride, block = add(LIST_ROWS, _ONE), listing.rows
    if bits:
        stride = words_of(BLOCKS if axis == "kv" else LIST_ROWS)
    bounds = (*loops.bounds, Let(name="list_line", value=line, span=condition.span))
    walked = ListWalk(
        memory=_MEMORY[axis, bits],
        line=Ref("list_line", "int", within=ends_of(line)),
        stride=stride,
        block=block,
        gathers=axis == "kv" and (gathers or listing.gathers),
        knows_full=listing.knows_full,
        queries=queries,
    )
    if bits and not listing.knows_full:
        kept = tuple(replace(loop, listed=walked) for loop in loops.loops)
        return replace(loops, bounds=bounds, loops=kept)
    loop = Loop(
        start=loops.loops[0].start if bits else ZERO,
        stop=loops.loops[-1].stop if bits else LENGTH[axis],
        masked=HIDES_SOME if listing.knows_full else True if walked.gathers else _is_partial(loops),
        zero_fill=any(loop.zero_fill for loop in loops.loops),
        listed=walked,
    )
    read = set() if isinstance(loop.masked, bool) else names_of(loop.masked)
    # a walk over a list ends where the list does: it reads no other end
    read |= names_of(loop.start) | names_of(loop.stop) if bits else set()
    return replace(loops, bounds=tuple(needed_for({"list_line", *read}, bounds)), loops=(loop,))


def along_entries(loops: Regions, listing: Listing, *, packs: bool) -> tuple[Regions, tuple[Let, ...]]:
    """Returns the loops over tiles of keys as a walk over single keys that a list names, and what a program
    finds out first: which list is its own, and N, how many keys that has.
    """
    walked = along_lists(loops, listing, "kv", packs=packs)
    *_, line = (let for let in walked.bounds if let.name == "list_line")
    assert isinstance(line, Let), "which list it is is no load"
    listed = walked.loops[0].listed
    kept = tuple(replace(loop, listed=listed) for loop in loops.loops)
    return replace(loops, loops=kept), (line, Let(name="N", value=LIST_LENGTH))


#: What a loop over tiles of an axis reads: numbers of blocks, or bits.
_MEMORY: Mapping[tuple[Axis, bool], Memory] = {
    ("kv", False): "lists",
    ("q", False): "columns",
    ("kv", True): "list_bits",
    ("q", True): "row_bits",
}


def _is_partial(loops: Regions) -> bool | Expr:
    first = loops.loops[0].start
    if all(loop.masked is False for loop in loops.loops):
        return False if first == ZERO else compare("<", START[loops.axis], first)
    if any(loop.masked is True and loop.guard is not None for loop in loops.loops) and len(loops.loops) == 1:
        return True
    partial = partial_test(loops)
    if partial == Const(True):
        return True
    return partial if first == ZERO else disj(partial, compare("<", START[loops.axis], first))


def _number(indices: Sequence[Expr], sizes: Sequence[Expr]) -> Expr:
    outside: list[Expr] = []
    for index, size in zip(indices, sizes, strict=True):
        if not is_inside(index, size):
            outside += [] if is_nonnegative(index) else [compare("<", index, ZERO)]
            outside.append(compare(">=", index, size))
    number = _number_inside(indices, sizes)
    return where(disj(*outside), Const(-1), number) if outside else number


def _number_inside(indices: Sequence[Expr], sizes: Sequence[Expr]) -> Expr:
    """The same of indices that are known to be less than these sizes, and not negative."""
    number: Expr = ZERO
    for index, size in zip(indices, sizes, strict=True):
        number = add(mul(number, size), index)
    return number


def _of_queries(listing: Listing, *, packs: bool) -> list[Expr]:
    """Returns the indices of the list that a tile of queries has. packs: as in `along_lists`."""
    at = {_Q_IDX: START["q"], **_heads_at(packs=packs)}
    return [substitute(index, at) for index in listing.condition.indices]


def _heads_at(*, packs: bool) -> dict[Expr, Expr]:
    """Returns what stands for heads where a tile has all query heads of a K/V head, whose lists are one."""
    return {GROUP: KV_HEAD, Index("h"): KV_HEAD} if packs else {}


def is_inside(index: Expr, size: Expr) -> bool:
    match index, size:
        case Index(name="b"), Dim(name="B"):
            return True
        case Index(name="h"), Dim(name="H"):
            return True
        case Const(value=at), Const(value=count):
            return 0 <= at < count
        case (Binary() | Ref()) as head, Dim(name="Hkv") if head in (GROUP, KV_HEAD):
            return True
        case _:
            return False


def line_of_queries(listing: Listing, *, packs: bool) -> Expr:
    """Returns the number of the list that a tile of queries has, which is known to have one. packs: as in
    `along_lists`, whose lists these are.
    """
    return _number_inside(_of_queries(listing, packs=packs), listing.sizes)


# --- what is made first


def list_making(
    listing: Listing, *, is_distinct: bool, by_entry: bool, kept: KeptBlocks | None
) -> ListMaking:
    """Returns the work on lists before kernels walk over them. is_distinct: no list names a block twice;
    by_entry: lists stay lists; kept: the mask that lists are made from, if no caller passes them.
    """
    condition = listing.condition
    return ListMaking(
        tensor=condition.tensor,
        extents=condition.extents,
        keys=listing.keys,
        limit=condition.limit,
        rows=listing.rows,
        row_axis=listing.row_axis,
        by_entry=by_entry,
        is_distinct=is_distinct,
        kept=kept,
    )


def unite(made: ListMaking, attention: Attention, listing: Listing, queries: int) -> ListMaking:
    """Returns the same where the queries of a tile walk together over the blocks that any of them lists."""
    at: dict[Expr, Expr] = {**_heads_at(packs=True), _Q_IDX: QUERY}
    if isinstance(q := attention.q.storage, Ragged):
        ends = attention.tensor(q.cu_seqlens).shape
        first = Load(q.cu_seqlens, (Index("b"),), ends, "int")
        at[Binary("+", first, _Q_IDX)] = QUERY_ROW
    places = tuple(substitute(index, at) for index in listing.condition.indices)
    ends_inside = (
        compare("<", place, size)
        for place, size in zip(places, listing.condition.extents, strict=False)
        if not is_inside(place, size) and (place, size) != (QUERY, Dim("M"))
    )
    return replace(made, queries=queries, places=places, exists=conj(*ends_inside))


def list_sizes(attention: Attention, listing: Listing | None) -> tuple[Let, ...]:
    """Returns the sizes that lists take, of those of the call."""
    if listing is None:
        return ()
    blocks = _round_up(longest(attention, Role.KEY), listing.keys)
    sizes = [Let(name=BLOCKS.name, value=blocks)]
    if listing.row_axis is not None and listing.rows:
        extent = listing.condition.extents[listing.row_axis]
        blocks = _round_up(longest(attention, Role.QUERY), listing.rows)
        sizes.append(Let(name=LIST_ROWS.name, value=minimum(extent, blocks)))
    return tuple(sizes)


def words_of(blocks: Expr) -> Expr:
    """Returns the words of a list that has a bit for each block."""
    return _round_up(blocks, 32)


def _round_up(size: Expr, block: int) -> Expr:
    return floordiv(add(size, Const(block - 1)), Const(block))


# --- tiles that divide blocks


def fit_blocks(found: Sequence[C], variant: Variant, schedule: Schedule, phase: Phase) -> tuple[C, ...]:
    """Returns the configs whose tiles divide the blocks that a mask lists, with tiles that the schedule
    leaves open made to.
    """
    listing = listing_of(variant.attention)
    if listing is None:
        return tuple(found)
    knobs, packs = schedule.phases[phase], packs_heads(schedule)
    rows = 0 if packs else listing.rows
    keys = 0 if listing.gathers or (packs and phase != "forward") else listing.keys
    return divide_blocks(
        (
            replace(
                config,
                tile_q=config.tile_q if "tile.q" in knobs else gcd(config.tile_q, rows),
                tile_kv=config.tile_kv if "tile.kv" in knobs else gcd(config.tile_kv, keys),
            )
            for config in found
        ),
        (rows, keys),
    )


def divide_blocks(found: Iterable[C], block: tuple[int, int]) -> tuple[C, ...]:
    """Returns the configs whose tiles divide a block of so many queries and keys; 0: any tiles do."""
    rows, keys = block
    fitting = (config for config in found if rows % config.tile_q == 0 and keys % config.tile_kv == 0)
    return tuple(dict.fromkeys(fitting))


def shares_ds(attention: Attention) -> bool:
    """Returns whether listed blocks have tiles of keys for two warpgroups that make dk, dv and dq together,
    and of queries, where few columns leave each half of the rows of dq.
    """
    listing = listing_of(attention)
    rows = 2 * WARPGROUP if feature(attention.q) <= WARPGROUP else WARPGROUP
    return listing is None or not (listing.keys % (2 * WARPGROUP) or listing.rows % rows)


def packs_heads(schedule: Schedule) -> bool:
    return "pack" in schedule.forward and schedule.forward["pack"].choices[0] == "gqa"
