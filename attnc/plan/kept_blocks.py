"""Lists of blocks that are found of a mask: which ones have a pair of a query and a key that it keeps.

Of a mask that looks data up, such as documents whose numbers do not ascend, nothing can be solved for a
range of keys (`expr.solve`). So a kernel evaluates it before each call, for all pairs of a block, and notes
the blocks that keep one. From there on they are blocks that a list names (`plan.lists`), beside the mask that
they are of. It notes too which of them the mask keeps as a whole: no kernel evaluates it there again. Nothing
is assumed of the data, and nothing of it is known to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import lcm
from typing import Literal, TypeAlias

from attnc.effort import memo_by_object
from attnc.expr.affine import Affine, N
from attnc.expr.construct import ONE, ZERO, add, compare, conj, disj, floordiv, maximum, minimum, where
from attnc.expr.interval import SIZE
from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    Const,
    Dim,
    Expr,
    Index,
    InList,
    Load,
    Or,
    Ref,
    Search,
    walk,
)
from attnc.expr.simplify import nnf, substitute
from attnc.expr.solve import solve
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Phase, Schedule
from attnc.plan.ir import Axis, Fetch, Statement, fetch_expressions
from attnc.plan.ir.list_making import Extreme, KeptBlocks
from attnc.plan.lists import BLOCKS, GROUP, KEPT_BLOCKS, KV_HEAD, WARPGROUP, Listing, lists_blocks
from attnc.plan.loads import LoadNames
from attnc.plan.mask_findings import dense_conditions, sums_of
from attnc.plan.signature import group_in_words, kv_heads, normalise
from attnc.plan.steps import dims_of, names_in, needed_for, shortened_lengths, tensors_of
from attnc.plan.width import is_wide

#: Queries and keys of a block where no schedule has other tiles, and the most of either.
_SIZE, _MOST = 128, 512
_KV_IDX = Index("kv_idx")
_QUERY = Ref("query", "int", natural=True, within=(0, SIZE))
_HEADS: Mapping[Expr, Expr] = {GROUP: KV_HEAD, Index("h"): KV_HEAD}
_FIRST_QUERY = Ref("first_query", "int", natural=True, within=(0, SIZE))
_LAST_QUERY = Ref("last_query", "int", within=(-1, SIZE))
#: The queries of a list, of which a kernel finds the keys.
_QUERIES: Mapping[Expr, Expr] = {Index("q_lo"): _FIRST_QUERY, Index("q_hi"): _LAST_QUERY}
#: The first and the last query of a list, and key of a block.
_ENDS: Mapping[Expr, tuple[Expr, Expr]] = {
    _QUERY: (_FIRST_QUERY, _LAST_QUERY),
    _KV_IDX: (
        Ref("first_key", "int", natural=True, within=(0, SIZE)),
        Ref("last_key", "int", natural=True, within=(0, SIZE)),
    ),
}
#: Locals of the kernel, beside those of all kernels (`plan.names`).
_LOCALS = frozenset(
    {
        "all_kept",
        "any_kept",
        "exists",
        "first_key",
        "first_query",
        "full",
        "hi",
        "inside",
        "is_whole",
        "last_key",
        "last_query",
        "may",
        "part",
        "query",
        "seen",
        "start",
        "stop",
        "sure",
        "to_try",
        "value",
    }
)


def add_list(variant: Variant, schedule: Schedule | None = None) -> Variant | None:
    """Returns the variant with a list of the blocks that its mask keeps beside that mask; None where it wants
    none. schedule: whose tiles divide the blocks; whether its kernels can walk over them is another question.
    """
    attention = variant.attention
    if not wants_list(attention) or (schedule is not None and schedule.is_decode):
        return None
    rows, keys = _size_of(schedule, "tile.q"), _size_of(schedule, "tile.kv")
    if max(rows, keys) > _MOST or keys & (keys - 1):
        return None
    condition = _condition(attention, rows, keys)
    mask = replace(conj(condition, attention.mask), span=attention.mask.span)
    return replace(variant, attention=replace(attention, mask=mask))


@memo_by_object
def wants_list(attention: Attention) -> bool:
    """Returns whether a mask looks data up in a way that no range of keys follows from, and blocks of
    ordinary queries could be listed for it.
    """
    if attention.mask.span is None or lists_blocks(attention) or attention.segment is not None:
        return False
    is_packed = attention.q.storage.is_packed or attention.k.storage.is_packed
    if is_packed or "M" in attention.lengths or _differs_in_group(attention):
        return False
    return next(dense_conditions(attention.mask), None) is not None


def _differs_in_group(attention: Attention) -> bool:
    shared: dict[Expr, Expr] = {GROUP: KV_HEAD}
    if kv_heads(normalise(attention)) == Dim("H"):
        shared[Index("h")] = KV_HEAD
    return Index("h") in walk(substitute(_mask_of(attention), shared))


def _mask_of(attention: Attention) -> Expr:
    return substitute(attention.mask, group_in_words(attention))


def _size_of(schedule: Schedule | None, key: Literal["tile.q", "tile.kv"]) -> int:
    """Returns positions of a block that all tiles divide which the schedule chooses."""
    if schedule is None:
        return _SIZE
    phases: tuple[Phase, ...] = ("forward", "backward", "dq", "dkdv")
    knobs = [(schedule.phases[phase].get(key), 1) for phase in phases]
    knobs += [(schedule.forward.get("consumers"), WARPGROUP)] if key == "tile.q" else []
    chosen = (size * x for knob, size in knobs if knob is not None for x in knob.choices if type(x) is int)
    size = reduce(lcm, chosen, 1)
    return size * -(-_SIZE // size) if _SIZE % size else _SIZE


def _condition(attention: Attention, rows: int, keys: int) -> InList:
    indices: list[Expr] = [Index("b")]
    sizes: list[Expr] = [Dim("B")]
    heads = kv_heads(normalise(attention))
    if Index("h") in walk(attention.mask) and heads != Const(1):
        indices.append(Index("h") if heads == Dim("H") else GROUP)
        sizes.append(heads)
    indices.append(floordiv(Index("q_idx"), Const(rows)))
    sizes.append(floordiv(add(Dim("M"), Const(rows - 1)), Const(rows)))
    entry = Binary("//", Index("kv_idx"), Const(keys))
    return InList(KEPT_BLOCKS, tuple(indices), (*sizes, BLOCKS), entry, span=attention.mask.span)


def plan_kept_blocks(attention: Attention, listing: Listing) -> KeptBlocks | None:
    """Returns the plan of the kernel that makes lists from a mask; None if the caller has made them.
    attention: normalised, with its list.
    """
    if listing.condition.tensor != KEPT_BLOCKS:
        return None
    mapping = {**_HEADS, Index("q_idx"): _QUERY}
    mapping[Index("q_pos")] = Binary("-", Binary("+", _QUERY, Dim("N")), Dim("M"))
    names = LoadNames.of(attention, taken=_LOCALS)
    lengths = shortened_lengths(attention, names)
    mask = substitute(listing.rest, mapping)
    keep = names.replace(mask)
    ends = _Extremes(names)
    normal = nnf(mask)
    conditions = normal.operands if isinstance(normal, And) else (normal,)
    of_data = [condition for condition in conditions if _reads_positions(condition)]
    may = conj(*map(ends.may, of_data))
    sure = conj(*map(ends.must, of_data))
    full = conj(*(ends.must(condition) for condition in conditions if condition not in of_data))
    others = [fetch for fetch in names.fetches if fetch not in lengths]
    statements = (*names.rows.values(), *lengths, *others)
    values = [end.value for end in ends.found.values()]
    needed = needed_for({"N"}.union(*map(_names_of, (keep, may, sure, full, *values))), statements)
    of_query = _depending_on("query", needed)
    of_key = _depending_on("kv_idx", needed)
    lo, hi = _range(listing.rest)
    used = (
        keep,
        lo,
        hi,
        may,
        sure,
        full,
        *values,
        *listing.condition.extents,
        *fetch_expressions(x for x in needed if isinstance(x, Fetch)),
    )
    return KeptBlocks(
        program=_select(needed, without=of_query | of_key),
        of_queries=_select(needed, of_query, without=of_key),
        of_keys=_select(needed, of_key, without=of_query),
        of_pairs=_select(needed, of_query & of_key),
        keep=keep,
        lo=lo,
        hi=hi,
        ends=tuple(ends.found.values()),
        may=may,
        sure=sure,
        full=full if sure != FALSE else FALSE,
        inputs=tuple((x.name, len(x.shape)) for x in attention.inputs if x.name in tensors_of(needed)),
        dims=dims_of(used),
    )


def _reads_positions(condition: Expr) -> bool:
    """Returns whether data are looked up for each query, or each key."""
    return any(isinstance(node, Load) and {_QUERY, _KV_IDX} & {*walk(node)} for node in walk(condition))


@dataclass(slots=True)
class _Extremes:
    """The ends that tell whether a block of queries and keys can have a pair that a mask keeps, or has no
    other: of conditions that compare something of the query with something of the key.
    """

    names: LoadNames
    found: dict[tuple[Expr, Axis, bool], Extreme] = field(default_factory=dict)

    def may(self, mask: Expr) -> Expr:
        """Returns, of a mask in negation normal form, what every block fulfils that has such a pair."""
        match mask:
            case And(operands=operands):
                return conj(*map(self.may, operands))
            case Or(operands=operands):
                tried = _Extremes(self.names.apart())
                says = all(tried.may(operand) != TRUE for operand in operands)
                return disj(*map(self.may, operands)) if says else TRUE
            case _:
                return conj(*map(self._reaches, sums_of(mask)))

    def must(self, mask: Expr) -> Expr:
        """Returns, of a mask in negation normal form, what no block fulfils that has a pair which it does not
        keep.
        """
        match mask:
            case And(operands=operands):
                return conj(*map(self.must, operands))
            case Or(operands=operands):
                tried = _Extremes(self.names.apart())
                return disj(*(self.must(x) for x in operands if tried.must(x) != FALSE))
            case _ if mask in (TRUE, FALSE):
                return mask
            case _ if sums := tuple(sums_of(mask)):
                return conj(*map(self._stays, sums))
            case _ if len(axes := [x for x in (_QUERY, _KV_IDX) if x in walk(mask)]) == 1:
                axis: Axis = "q" if axes == [_QUERY] else "kv"
                return compare(">=", self._find_extreme(where(mask, ONE, ZERO), axis, is_most=False), ONE)
            case _:
                return FALSE

    def _stays(self, total: Affine) -> Expr:
        """Returns whether a sum of a part of the query and one of the key is 0 or more for all pairs."""
        of_query, of_key = _parts(total)
        if {*of_query} & {*of_key}:
            return FALSE
        rest = Affine(tuple(term for term in total.terms if term not in of_key), total.const)
        keys = Affine(tuple(of_key), 0)
        if of_query and of_query[0][1] > 0:
            return compare(">=", self._end(rest, "q", is_most=False), self._end(-keys, "kv", is_most=True))
        return compare("<=", self._end(-rest, "q", is_most=True), self._end(keys, "kv", is_most=False))

    def _reaches(self, total: Affine) -> Expr:
        """Returns whether a sum of a part of the query and one of the key can be 0 or more."""
        of_query, of_key = _parts(total)
        is_data = any(isinstance(node, Load) for atom, _ in (*of_query, *of_key) for node in walk(atom))
        if not (of_query and of_key and is_data) or {*of_query} & {*of_key}:
            return TRUE
        rest = Affine(tuple(term for term in total.terms if term not in of_key), total.const)
        keys = Affine(tuple(of_key), 0)
        if of_query[0][1] > 0:  # what is loaded is not negated, which 64 bits may not hold
            return compare(">=", self._end(rest, "q", is_most=True), self._end(-keys, "kv", is_most=False))
        return compare("<=", self._end(-rest, "q", is_most=False), self._end(keys, "kv", is_most=True))

    def _end(self, value: Affine, axis: Axis, *, is_most: bool) -> Expr:
        if not any(_ENDS.keys() & {*walk(atom)} and atom not in _ENDS for atom, _ in value.terms):
            # of positions: at one end of their block
            place = {atom: _ENDS[atom][(c > 0) == is_most] for atom, c in value.terms if atom in _ENDS}
            return self.names.replace(substitute(value.expr, place))
        return self._find_extreme(value.expr, axis, is_most=is_most)

    def _find_extreme(self, value: Expr, axis: Axis, *, is_most: bool) -> Ref:
        key = (value, axis, is_most)
        if key not in self.found:
            name = f"{'most' if is_most else 'least'}_{len(self.found)}"
            named = self.names.replace(value)
            self.found[key] = Extreme(
                name=name, value=named, axis=axis, is_most=is_most, is_wide=is_wide(named)
            )
        return Ref(self.found[key].name, "int", wide=True)


_Terms: TypeAlias = list[tuple[Expr, int]]


def _parts(total: Affine) -> tuple[_Terms, _Terms]:
    """Returns the terms of a sum that the query decides, and those that the key does."""
    of_query = [term for term in total.terms if _QUERY in walk(term[0])]
    return of_query, [term for term in total.terms if _KV_IDX in walk(term[0])]


def _range(mask: Expr) -> tuple[Expr, Expr]:
    """Returns where the keys begin and end that a mask keeps for some queries, as far as positions tell."""
    ranges = solve(mask)
    first = _replace_positions(ranges.may_lo)
    last = _replace_positions(ranges.may_hi)
    return (ZERO if first is None else maximum(first, ZERO)), (N if last is None else minimum(last, N))


def _replace_positions(end: Expr | None) -> Expr | None:
    if end is None or any(isinstance(node, Load | Search) for node in walk(end)):
        return None
    return substitute(end, {**_HEADS, **_QUERIES})


def _names_of(keep: Expr) -> set[str]:
    return {node.name for node in walk(keep) if isinstance(node, Ref | Dim | Index)}


def _depending_on(name: str, statements: Sequence[Statement]) -> set[str]:
    found = {name}
    for item in statements:
        if found & names_in(item):
            found.add(item.name)
    return found - {name}


def _select(
    statements: Sequence[Statement], among: Collection[str] | None = None, *, without: Collection[str] = ()
) -> tuple[Statement, ...]:
    chosen = (item for item in statements if among is None or item.name in among)
    return tuple(item for item in chosen if item.name not in without)
