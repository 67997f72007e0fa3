"""What the mask analysis can tell a user about a mask, before any kernel runs.

The same solve that gives a kernel its loop bounds shows a mask that keeps nothing, one that lets no tile be
skipped, conditions of data for which none is, and rows that see nothing when there are more queries than
keys. Types of words show bits that they do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from attnc.diagnostics import Diagnostic, Label, warning
from attnc.expr.affine import KV_LO, Q_LO, Affine, affine, at_least
from attnc.expr.construct import negate
from attnc.expr.nodes import (
    TRUE,
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Expr,
    Index,
    InList,
    Load,
    Or,
    show,
    uses,
    walk,
)
from attnc.expr.simplify import nnf, simplify, substitute
from attnc.expr.solve import Ranges, solve
from attnc.model.attention import Variant
from attnc.source import Span

#: Conditions of one `and` that are compared pair by pair.
_COMPARED = 24
#: Keys of a tile or two.
_FEW_KEYS = 128


def check_mask(variant: Variant) -> Iterator[Diagnostic]:
    """Warnings about masks that are probably not what was meant."""
    mask = variant.attention.mask
    if mask == TRUE or mask.span is None:
        return
    keys, queries = solve(mask, var="kv_idx"), solve(mask, var="q_idx")
    if keys.never or contradicts(mask):
        yield warning(
            "W0701",
            "the mask is never true",
            mask.span,
            "keeps no element",
            notes=("every row sees nothing: o = 0, lse = -inf",),
        )
        return
    yield from _missing_bits(mask, {x.name: str(x.dtype) for x in variant.attention.inputs})
    dense = () if _lists(mask) else tuple(dense_conditions(mask))  # listed blocks alone are visited
    written: dict[Span, list[Expr]] = {}
    for condition in dense:  # several of one def's stand in one place
        written.setdefault(_place(condition, mask), []).append(condition)
    for span, conditions in written.items():
        yield _dense(conditions, span, keys)
    if (
        not dense
        and not _lists(mask)
        and not keys.full
        and _visits_everything(keys)
        and _visits_everything(queries)
    ):
        yield warning(
            "W0702",
            "no tile can be skipped under this mask",
            mask.span,
            "keeps some tiles whole and excludes none" if keys.any_full else "is evaluated for every element",
            notes=("nothing in it bounds kv_idx by q_idx, by a length or by a sorted input",),
            hints=("if a bound is meant, say it too: 'causal and ...', 'kv_idx < length[b] and ...'",),
        )


#: Bits of a word, by its type.
_BITS = {"u8": 8, "i32": 32, "i64": 64}


def _missing_bits(mask: Expr, types: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Warnings about remainders that name bits which a loaded word does not have."""
    found: dict[str, int] = {}
    for node in walk(mask):
        match node:
            case Call("bit", (Load(tensor=tensor), Binary(op="%", right=Const(value=int(size))))):
                if size > _BITS.get(types.get(tensor, ""), size):
                    found[tensor] = size
    for tensor, size in found.items():
        assert mask.span is not None
        bits = _BITS[types[tensor]]
        rest = "are false" if bits == min(_BITS.values()) else f"are its sign, bit {bits - 1}"
        yield warning(
            "W0706",
            f"words of {size} bits are read from '{tensor}', which has words of {bits}",
            mask.span,
            f"bits {bits} to {size - 1} of a word {rest}",
            hints=(
                f"read {bits} of each word: '// {bits}' and '% {bits}', or 'draft_tree({tensor}, {bits})'",
            ),
        )


#: The code of a condition of data for which no tile is skipped.
DENSE = "W0704"


#: The target and the label of a schedule.
ScheduleName: TypeAlias = tuple[str, str]


def name_all(schedules: Iterable[ScheduleName]) -> str:
    """Returns targets, each once, with labels of their schedules: "triton and cuda.sm_80 (decode, rows)"."""
    labels: dict[str, list[str]] = {}
    for target, label in dict.fromkeys(schedules):
        labels.setdefault(target, []).append(label)
    return " and ".join(f"{target} ({', '.join(of)})" if any(of) else target for target, of in labels.items())


def dense_conditions(mask: Expr) -> Iterator[Expr]:
    """Yields the conditions of a mask that look data up by position and exclude no tile.

    One that also keeps whatever stands before a number of the last keys, `kv_idx < N - T or tree[...]`, costs
    nothing: nearly all of its tiles are wanted. Nor does any condition beside one that leaves a tile or two.
    """
    if _is_short(solve(mask, var="kv_idx")):
        return
    normal = nnf(mask)
    for condition in normal.operands if isinstance(normal, And) else (normal,):
        if next(_looked_up(condition), None) is None or _lists(condition):
            continue
        keys = solve(condition, var="kv_idx")
        if keys.full or not _visits_everything(keys) or not _visits_everything(solve(condition, var="q_idx")):
            continue
        parts = () if keys.must_hi is None else tuple(walk(keys.must_hi))
        if any(isinstance(part, Index) for part in parts) or not any(isinstance(part, Dim) for part in parts):
            yield condition


def _is_short(keys: Ranges) -> bool:
    match keys.may_lo, keys.may_hi:
        case None, Const(value=int(end)):
            return end <= _FEW_KEYS
        case _:
            return False


def _lists(mask: Expr) -> bool:
    return any(isinstance(node, InList) for node in walk(mask))


def _looked_up(condition: Expr) -> Iterator[Load]:
    for part in walk(condition):
        if isinstance(part, Load) and any(uses(index) & _POSITIONS for index in part.indices):
            yield part


_POSITIONS = frozenset(("q_idx", "kv_idx"))


def _place(condition: Expr, mask: Expr) -> Span:
    written = (part for part in walk(mask) if isinstance(part, Compare) and part.span is not None)
    found = next((part.span for part in written if nnf(part) == condition), mask.span)
    assert found is not None
    return condition.span or found


def _dense(conditions: Sequence[Expr], span: Span, keys: Ranges) -> Diagnostic:
    loads = [load for condition in conditions for load in _looked_up(condition)]
    names = " and ".join(f"'{name}'" for name in dict.fromkeys(load.tensor for load in loads))
    hints = []
    if keys.may_hi is None:
        hints = ["if a bound is known, say it too: 'causal and ...', 'kv_idx < length[b] and ...'"]
    elif keys.may_lo is None:
        hints = ["if a bound at the other end is known, say it too: 'q_pos - kv_idx < 4096 and ...'"]
    if ascending := next(filter(None, map(_may_ascend, conditions)), ""):
        hints.insert(0, f"if '{ascending}' ascends along its last axis, declare it 'sorted'")
    return warning(
        DENSE,
        f"no tile is skipped for a condition that is read from {names}",
        span,
        "is looked up for every element",
        notes=("tiles that it excludes as a whole are loaded and multiplied like all others",),
        hints=tuple(hints),
    )


def _may_ascend(condition: Expr) -> str:
    """Names the input of numbers that a condition compares between the query and the key, if it is not said
    to be sorted; "" for other conditions.
    """
    match condition:
        case Compare(op="==", left=Load() as left, right=Load() as right) if (
            left.tensor == right.tensor and left.type == "int" and not left.is_sorted
        ):
            return left.tensor
    return ""


def contradicts(mask: Expr) -> bool:
    """Returns whether no pair of positions satisfies the mask, because two of its conditions exclude each
    other.

    Every comparison of integers is a sum that is at least 0 (`expr.affine`); two such sums that add up to
    less for all positions exclude each other. That decides all pairs over the same positions, such as
    `kv_idx <= q_idx and kv_idx > q_idx`; three conditions that only together exclude each other are not seen.
    """
    return _contradicts(nnf(mask))


def _contradicts(mask: Expr) -> bool:
    match mask:
        case Or(operands=operands):
            return all(map(_contradicts, operands))
        case And(operands=operands):
            conditions = set(operands)
            if any(negate(operand) in conditions or _contradicts(operand) for operand in operands):
                return True
            sums = [total for operand in operands[:_COMPARED] for total in sums_of(operand)]
            opaque = [frozenset(_opaque(total)) for total in sums]
            negated = [frozenset((atom, -c) for atom, c in terms) for terms in opaque]
            return any(
                opaque[i] == negated[j] and _is_negative(sums[i] + sums[j])
                for i, j in combinations(range(len(sums)), 2)
            )
        case _:
            return False


def sums_of(condition: Expr) -> Iterator[Affine]:
    """Yields sums that are at least 0 where a comparison of integers holds."""
    match condition:
        case Compare(op=op, left=left, right=right) if left.type == right.type == "int":
            difference = affine(left) - affine(right)
            match op:
                case ">=" | ">":
                    yield difference - (op == ">")
                case "<=" | "<":
                    yield -difference - (op == "<")
                case "==":
                    yield from (difference, -difference)


def _opaque(total: Affine) -> Iterator[tuple[str, int]]:
    return ((show(atom), c) for atom, c in total.terms if not isinstance(atom, Index | Dim))


def _is_negative(total: Affine) -> bool:
    places: dict[Expr, Expr] = {Index("q_idx"): Q_LO, Index("kv_idx"): KV_LO}
    return at_least(Const(-1), substitute(total.expr, places))


def mask_notes(variant: Variant) -> Iterator[Diagnostic]:
    """Yields the warnings and notes about a mask that has no mistake."""
    span = variant.attention.mask.span
    if span is not None and _hides_early_rows(solve(variant.attention.mask, var="kv_idx")):
        yield _early_rows(span)


def _visits_everything(ranges: Ranges) -> bool:
    return ranges.may_lo is None and ranges.may_hi is None and ranges.tile_may is None


def _hides_early_rows(ranges: Ranges) -> bool:
    """Returns whether row 0 of 64 queries over 32 keys sees nothing because of where it stands."""
    if ranges.may_hi is None:
        return False
    sizes: dict[Expr, Expr] = {
        Dim("M"): Const(64),
        Dim("N"): Const(32),
        Index("q_lo"): Const(0),
        Index("q_hi"): Const(0),
    }
    match simplify(substitute(ranges.may_hi, sizes)):
        case Const(value=end):
            return end <= 0
        case _:
            return False


def _early_rows(span: Span) -> Diagnostic:
    return Diagnostic(
        code="W0703",
        severity="note",
        message="rows with q_pos < 0 see nothing when M > N",
        primary=Label(span, "ends at the position of the query"),
        notes=("the last query is aligned with the last key; such rows give o = 0, lse = -inf, gradients 0",),
    )
