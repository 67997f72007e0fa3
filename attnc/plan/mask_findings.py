"""What the mask analysis can tell a user about a mask, before any kernel runs.

The same solve that gives a kernel its loop bounds shows a mask that keeps nothing, one that lets no tile be
skipped, and one under which some rows see nothing when there are more queries than keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.diagnostics import Diagnostic, Label, warning
from attnc.expr.nodes import TRUE, Const, Dim, Expr, Index
from attnc.expr.simplify import simplify, substitute
from attnc.expr.solve import Ranges, solve
from attnc.model.attention import Variant
from attnc.source import Span


def check_mask(variant: Variant) -> Iterator[Diagnostic]:
    """Warnings about masks that are probably not what was meant."""
    mask = variant.attention.mask
    if mask == TRUE or mask.span is None:
        return
    keys, queries = solve(mask, var="kv_idx"), solve(mask, var="q_idx")
    if keys.never:
        yield warning(
            "W0701",
            "the mask is never true",
            mask.span,
            "keeps no element",
            notes=("every row sees nothing: o = 0, lse = -inf",),
        )
    elif not keys.full and _visits_everything(keys) and _visits_everything(queries):
        yield warning(
            "W0702",
            "no tile can be skipped under this mask",
            mask.span,
            "is evaluated for every element",
            notes=("nothing in it bounds kv_idx by q_idx, by a length or by a sorted input",),
            hints=("if a bound is meant, say it too: 'causal and ...', 'kv_idx < length[b] and ...'",),
        )


def mask_notes(variant: Variant) -> Iterator[Diagnostic]:
    """What is worth knowing of a mask that is right."""
    span = variant.attention.mask.span
    if span is not None and _hides_early_rows(solve(variant.attention.mask, var="kv_idx")):
        yield _early_rows(span)


def _visits_everything(ranges: Ranges) -> bool:
    """Neither a range nor a test of tiles excludes anything."""
    return ranges.may_lo is None and ranges.may_hi is None and ranges.tile_may is None


def _hides_early_rows(ranges: Ranges) -> bool:
    """Whether row 0 of 64 queries over 32 keys sees nothing because of where it stands."""
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
