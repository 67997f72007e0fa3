"""Lists of keys, or of blocks, as lists of rows of memory, for kernels that take rows wherever they lie.

A list names positions of keys. Which of them a query sees is more than that: the rest of the mask, the length
of its sequence, pages, the place of a packed sequence. All of it is the same for every head that shares keys,
so the kernel that brings a list into order drops keys that the query does not see, and writes where the
others lie. The kernel behind it attends over all rows of a list: packed queries are queries of one sequence,
and its text is that of a list alone.

With `lists = union` the queries whose heads fill a tile have one list, of all keys that any of them names.
Each key is read and multiplied once for all of them, and a bit for each query says whether it counts. Where
lists name blocks that tiles divide, no key becomes a row of memory: tiles of queries walk over bits of
blocks, as tiles of neighbouring queries with one list do, and a bit for each query says the same of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from attnc.expr.construct import ZERO, add, compare, conj, floordiv, minimum, mul, where
from attnc.expr.interval import I32, SIZE
from attnc.expr.nodes import TRUE, Binary, Call, Const, Dim, Expr, Index, InList, Load, Ref, Search, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import Schedule
from attnc.model.tensors import Dense, Paged, Ragged, Role, Tensor
from attnc.plan.ir import Fetch, Let, Loop, Regions, Statement, fetch_expressions
from attnc.plan.ir.lists import ListWalk
from attnc.plan.ir.module import ListedRows
from attnc.plan.lists import (
    BLOCKS,
    GROUP,
    KV_HEAD,
    LIST_LENGTH,
    QUERY,
    QUERY_ROW,
    Listing,
    is_inside,
    listing_of,
    packs_heads,
)
from attnc.plan.loads import LoadNames, is_nonnegative
from attnc.plan.signature import kv_heads, normalise
from attnc.plan.steps import dims_of, fetches_for, needed_for, shortened_lengths
from attnc.plan.target import Target
from attnc.plan.width import ends_of

#: The sequence of packed queries.
_SEQUENCE = Ref("sequence", "int", within=(-1, SIZE))
#: Locals of the kernel, beside those of all kernels (`plan.names`).
_LOCALS = frozenset(
    {"counts", "key", "keys", "keeps", "own", "own_lo", "own_words", "query", "query_row", "totals", "warp"}
    | {"members", "place", "query_lo"}
)
#: Rows of a tile of queries that share a list, and the most of them: a key, or a block, has a byte of bits.
TILE_ROWS, _MOST_QUERIES = 64, 8


def unites_lists(schedule: Schedule) -> bool:
    """Returns whether the schedule wants one list for the queries of a tile."""
    knob = schedule.forward.get("lists")
    return knob is not None and "union" in knob.choices


def unites_blocks(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether the queries of a tile walk together over the blocks that any of them lists."""
    listing = listing_of(attention)
    return listing is not None and not listing.gathers and unites_lists(schedule)


def queries_of_walk(attention: Attention, schedule: Schedule) -> int:
    """Returns how many queries, each with a list of blocks, walk over them together."""
    return queries_together(attention) if unites_blocks(attention, schedule) else 1


def queries_together(attention: Attention) -> int:
    """Returns how many queries fill a tile with the heads of a group: 2 to 8, or 1 where heads are not known,
    or too many.
    """
    match attention.group:
        case Const(value=int() as heads) if heads <= TILE_ROWS // 2:
            return min(TILE_ROWS >> (heads - 1).bit_length(), _MOST_QUERIES)
        case _:
            return 1


def can_unite(attention: Attention) -> bool:
    """Returns whether neighbouring queries can share tiles over the union of their lists."""
    listing = listing_of(attention)
    if listing is None or listing.rows != 1 or (listing.gathers and listing.keys != 1):
        return False
    if "M" in attention.lengths:
        return False
    return queries_together(attention) > 1 and not DType(attention.k.dtype).is_narrow


def reads_by_row(attention: Attention) -> bool:
    """Returns whether a row of memory says what products read beside columns of its key, wherever the key is
    in a sequence: of keys in pages, page and place; of others, both are the key.
    """
    if attention.k.storage.is_paged:
        return all(is_of_page(attention, read) for read in attention.column_reads)
    is_packed = attention.q.storage.is_packed or attention.k.storage.is_packed
    return not (is_packed and attention.column_reads)


def is_of_page(attention: Attention, read: Expr) -> bool:
    """Returns whether this is the same for all sequences that share a page of keys."""
    found: dict[Expr, Expr] = dict.fromkeys(_page_loads(attention, read), ZERO)
    found[Binary("%", Index("kv_idx"), Const(attention.k.storage.rows_of_page))] = ZERO
    return not {Index("b"), Index("kv_idx"), Index("kv_pos")} & set(walk(substitute(read, found)))


def _page_loads(attention: Attention, read: Expr) -> list[Load]:
    """Returns the loads in an expression that say in which page a key lies."""
    storage = attention.k.storage
    if not storage.is_paged:
        return []
    here = (Index("b"), floordiv(Index("kv_idx"), Const(storage.rows_of_page)))
    return [x for x in walk(read) if isinstance(x, Load) and x.tensor == storage.table and x.indices == here]


def has_empty_rows(attention: Attention) -> bool:
    """Returns whether rows of q that are no query show a denominator: a sink, or what softpick adds."""
    softmax = attention.softmax
    shows = softmax.sink is not None or (softmax.form == "softpick" and attention.lse is not None)
    return shows and (attention.q.storage.is_packed or "M" in attention.lengths)


def lists_rows(attention: Attention, schedule: Schedule, target: Target) -> bool:
    """Returns whether more than a list of single keys says what a query sees, for kernels that take all rows
    of a list: also where it names blocks, of which all keys are rows.
    """
    listing = listing_of(attention)
    if listing is None or not (schedule.is_decode and packs_heads(schedule)):
        return False
    if unites_blocks(attention, schedule):
        return False
    if not target.takes_listed_rows:  # these test a mask key by key, and look up pages
        are_packed = attention.q.storage.is_packed and attention.k.storage.is_packed
        return not target.lists_are_bits and listing.keys == 1 and are_packed
    if listing.keys != 1 or unites_lists(schedule):
        return True
    tensors = (attention.q, attention.k, attention.v)
    are_plain = all(tensor.storage.is_plain or tensor.storage.is_part for tensor in tensors)
    return not are_plain or listing.rest != TRUE or bool(attention.lengths)


def as_rows(variant: Variant, made: ListedRows) -> Variant:
    """Returns the variant as a kernel sees it that takes all rows of a list: with packed sequences as one,
    and no more of the mask than the list of each query.
    """
    attention = name_sequences(variant.attention)
    listing = listing_of(attention)
    assert listing is not None
    names = {"q", "k", "v", *(tensor.name for tensor in attention.outputs)}

    def lay_flat(tensor: Tensor) -> Tensor:
        is_packed = tensor.name in names and tensor.storage.is_packed
        return replace(tensor, storage=Dense()) if is_packed else tensor

    sizes: tuple[Expr, ...] = (Dim("B"), *((made.lines[1],) if made.by_head else ()), Dim("M"))
    places: tuple[Expr, ...] = (Index("b"), *((GROUP,) if made.by_head else ()), Index("q_idx"))
    condition = listing.condition
    entries = (*sizes, made.entries)
    own = InList(condition.tensor, places, entries, Index("kv_idx"), span=attention.mask.span)
    # rows of memory are the keys, and say their page
    pages: dict[Expr, Expr] = {
        load: load.indices[1] for read in attention.column_reads for load in _page_loads(attention, read)
    }
    seen = attention.rewrite(lambda expr: substitute(expr, pages), lambda tensor: tensor)
    flat = replace(
        seen,
        inputs=tuple(map(lay_flat, attention.inputs)),
        outputs=tuple(map(lay_flat, attention.outputs)),
        lengths={},
        mask=own,
    )
    return replace(variant, attention=flat)


def name_sequences(attention: Attention) -> Attention:
    """Returns the attention with sequences counted by a name of their own, where queries are packed: a kernel
    sees one sequence. So have sizes that inputs call M and N beside packed rows.
    """
    packs_queries, packs_keys = (tensor.storage.is_packed for tensor in (attention.q, attention.k))
    taken = {
        node.name
        for x in attention.inputs
        for size in x.shape
        for node in walk(size)
        if isinstance(node, Dim)
    }
    batch: dict[Expr, Expr] = {Dim("B"): _free_size("sequences", taken)} if packs_queries else {}
    axes = dict(batch)
    axes |= {Dim("M"): _free_size("most_queries", taken)} if packs_queries else {}
    axes |= {Dim("N"): _free_size("most_keys", taken)} if packs_keys else {}
    if not axes:
        return attention

    def fix_tensor(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=tuple(substitute(size, axes) for size in tensor.shape))

    return attention.rewrite(lambda expr: substitute(expr, batch), fix_tensor)


def _free_size(name: str, taken: Collection[str]) -> Dim:
    return Dim(name) if name not in taken else _free_size(f"{name}_", taken)


def row_sizes(attention: Attention) -> tuple[Let, ...]:
    """Returns sizes of packed sequences as a kernel sees them: one sequence of all rows."""
    found = []
    if attention.q.storage.is_packed:
        found += [Let(name="B", value=Const(1)), Let(name="M", value=attention.q.size(Role.QUERY))]
    if attention.k.storage.is_packed:
        found.append(Let(name="N", value=attention.k.size(Role.KEY)))
    return tuple(found)


def plan_listed_rows(variant: Variant, schedule: Schedule) -> ListedRows:
    """Returns the plan of the kernel that makes lists of rows."""
    queries = queries_together(variant.attention) if unites_lists(schedule) else 1
    return _RowsPlanner(normalise(name_sequences(variant.attention)), queries).make()


def along_rows(loops: Regions, made: ListedRows) -> tuple[Regions, tuple[Let, ...]]:
    """Returns the loops over tiles of keys as a walk over the rows of a list, and what a program finds out
    first: which list is its own, and N, how many rows that has.
    """
    number: Expr = ZERO
    own = floordiv(Index("q_lo"), Const(made.queries))
    places: tuple[Expr, ...] = (Index("b"), *((KV_HEAD,) if made.by_head else ()), own)
    for place, size in zip(places, made.lines, strict=True):
        number = add(mul(number, size), place)
    if made.by_head:  # a product of three sizes: as for other lists, a tile of no query has none
        number = where(compare(">=", Index("q_lo"), Dim("M")), Const(-1), number)
    walked = ListWalk(
        memory="lists",
        line=Ref("list_line", "int", within=ends_of(number)),
        stride=made.stride,
        block=1,
        gathers=True,
    )
    kept: tuple[Loop, ...] = tuple(replace(loop, listed=walked) for loop in loops.loops)
    length: Expr = Call("max", (LIST_LENGTH, ZERO)) if made.marks and made.queries == 1 else LIST_LENGTH
    lines = (Let(name="list_line", value=number), Let(name="N", value=length))
    return replace(loops, loops=kept), lines


class _RowsPlanner:
    def __init__(self, attention: Attention, queries: int) -> None:
        listing = listing_of(attention)
        assert listing is not None
        self._queries = queries
        self._packed = attention.q.storage.is_packed
        self._heads = kv_heads(attention)
        self._mapping: dict[Expr, Expr] = {GROUP: KV_HEAD, Index("h"): KV_HEAD, Index("q_idx"): QUERY}
        self._mapping[Index("q_pos")] = Binary("-", Binary("+", QUERY, Dim("N")), Dim("M"))
        self._sequences: Expr = Dim("B")
        if isinstance(q := attention.q.storage, Ragged):
            self._sequences = add(attention.tensor(q.cu_seqlens).shape[0], Const(-1))
            ends = attention.tensor(q.cu_seqlens).shape
            of_row = Binary("+", Load(q.cu_seqlens, (Index("b"),), ends, "int"), Index("q_idx"))
            self._mapping |= {Index("b"): _SEQUENCE, of_row: QUERY_ROW}
        self._attention = replace(
            attention, lengths={name: self._here(value) for name, value in attention.lengths.items()}
        )
        self._listing: Listing = listing
        self._names = LoadNames.of(self._attention, taken=_LOCALS)

    def _here(self, expr: Expr) -> Expr:
        return substitute(expr, self._mapping)

    def make(self) -> ListedRows:
        condition, names = self._listing.condition, self._names
        of_sequence = tuple(self._lengths())
        indices = tuple(names.replace(self._here(index)) for index in condition.indices)
        limit = None if condition.limit is None else names.replace(self._here(condition.limit))
        keep = names.replace(self._here(self._listing.rest))
        page = self._page()
        lines, by_head = self._lines((*condition.indices, condition.limit, self._listing.rest))
        loads = [fetch for fetch in names.fetches if fetch not in of_sequence]
        of_keys = fetches_for((fetch for fetch in loads if fetch.axes), keep)
        first = self._first()
        is_query = self._is_query()
        exists = conj(is_query, *self._are_inside(indices))
        program = (*names.rows.values(), *of_sequence, *(fetch for fetch in loads if not fetch.axes))
        of_each = (*of_keys, *(() if page is None else (page,)))
        read = (*indices, exists, keep, first, Dim("N"), *(() if limit is None else (limit,)))
        rows = self._attention.q.size(Role.QUERY) if self._packed else Dim("M")
        together = Const(1) if self._queries == 1 else minimum(rows, Const(self._queries))
        entries = mul(mul(condition.extents[-1], Const(condition.keys)), together)
        needed, dims = self._find_needed(program, of_each, (*read, entries), lines)
        return ListedRows(
            lines=lines,
            entries=entries,
            by_head=by_head,
            packed=self._packed,
            queries=self._queries,
            marks=has_empty_rows(self._attention),
            program=needed,
            indices=indices,
            is_query=is_query,
            exists=exists,
            limit=limit,
            fetches=of_keys,
            keep=keep,
            first=first,
            page=page,
            page_rows=self._page_rows(),
            dims=dims,
        )

    def _find_needed(
        self,
        program: Sequence[Statement],
        of_each: Collection[Fetch],
        read: Iterable[Expr],
        lines: Iterable[Expr],
    ) -> tuple[tuple[Statement, ...], tuple[str, ...]]:
        """Returns the statements of a program that are needed, and the sizes that they read. of_each: loads
        of each key; read: other names that are read.
        """
        read = (*read, *fetch_expressions(of_each))
        wanted = {node.name for expr in read for node in walk(expr) if isinstance(node, Ref | Dim | Index)}
        wanted |= {fetch.row.name for fetch in of_each if fetch.row}
        needed = tuple(needed_for(wanted, program))
        used = (*read, *lines, *fetch_expressions(x for x in needed if isinstance(x, Fetch)))
        used += tuple(x.value for x in needed if isinstance(x, Let))
        own = {"B", "M"} if self._packed else set()
        own |= {"N"} if self._attention.k.storage.is_packed else set()
        return needed, tuple(name for name in dims_of(used) if name not in own)

    def _lengths(self) -> Iterator[Statement]:
        attention, here = self._attention, _SEQUENCE if self._packed else Index("b")
        q, k = attention.q.storage, attention.k.storage
        if isinstance(q, Ragged):
            ends = attention.tensor(q.cu_seqlens).shape
            search = Search("upper", q.cu_seqlens, (), ends, QUERY_ROW)
            yield Let(name=_SEQUENCE.name, value=Binary("-", search, Const(1)))
            first, end = (
                self._boundary(q, here, step, f"q_{name}") for step, name in enumerate(("first", "end"))
            )
            yield from (first, end)
            yield Let(name="M", value=Binary("-", _value(end), _value(first)))
            yield Let(name=QUERY.name, value=Binary("-", QUERY_ROW, _value(first)))
        if isinstance(k, Ragged):
            first, end = (
                self._boundary(k, here, step, f"k_{name}") for step, name in enumerate(("first", "end"))
            )
            yield from (first, end)
            yield Let(name="N", value=Binary("-", _value(end), _value(first)))
        yield from shortened_lengths(attention, self._names)

    def _boundary(self, storage: Ragged, sequence: Expr, step: int, name: str) -> Fetch:
        index = sequence if step == 0 else Binary("+", sequence, Const(step))
        cu = self._attention.tensor(storage.cu_seqlens)
        guard = conj(compare("<=", ZERO, index), compare("<", index, cu.shape[0])) if self._packed else TRUE
        return Fetch(name=name, load=Load(cu.name, (index,), cu.shape, "int"), axes=(), guard=guard)

    def _is_query(self) -> Expr:
        ends = [compare("<=", ZERO, _SEQUENCE), compare("<", _SEQUENCE, self._sequences)]
        return conj(*(ends if self._packed else ()), compare("<", QUERY, Dim("M")))

    def _are_inside(self, indices: tuple[Expr, ...]) -> Iterator[Expr]:
        for index, size in zip(indices, self._listing.condition.extents, strict=False):
            if not is_inside(index, size):
                yield TRUE if is_nonnegative(index) else compare("<=", ZERO, index)
                yield compare("<", index, size)

    def _lines(self, read: tuple[Expr | None, ...]) -> tuple[tuple[Expr, ...], bool]:
        rows = self._attention.q.size(Role.QUERY) if self._packed else Dim("M")
        by_head = any(Index("h") in walk(expr) for expr in read if expr is not None) and self._heads != Const(
            1
        )
        heads = (self._heads,) if by_head else ()
        tiles = floordiv(add(rows, Const(self._queries - 1)), Const(self._queries))
        return (Const(1) if self._packed else Dim("B"), *heads, tiles), by_head

    def _page(self) -> Fetch | None:
        storage = self._attention.k.storage
        if not isinstance(storage, Paged):
            return None
        table = self._attention.tensor(storage.block_table)
        number = floordiv(Index("kv_idx"), Const(storage.page))
        here = _SEQUENCE if self._packed else Index("b")
        load = Load(table.name, (here, number), table.shape, "int")
        self._names.replace(load)
        return next(fetch for fetch in self._names.fetches if fetch.load == load)

    def _page_rows(self) -> Expr | None:
        match self._attention.k.storage:
            case Paged(page=page):
                return Const(page)
            case Ragged():
                return None
            case _:
                return BLOCKS if self._packed else None

    def _first(self) -> Expr:
        if self._attention.k.storage.is_packed:
            return Ref("k_first", "int", within=(0, I32.hi))
        is_page = self._packed and not self._attention.k.storage.is_paged
        return mul(_SEQUENCE, BLOCKS) if is_page else ZERO


def _value(boundary: Fetch) -> Ref:
    return Ref(boundary.name, "int", within=(0, I32.hi))
