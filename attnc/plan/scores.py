"""Scores in base 2: exp(x) = exp2(x * log2 e), with every constant folded where it costs nothing."""

from __future__ import annotations

import math

from attnc.expr.nodes import Binary, Const, Dot, Expr
from attnc.expr.simplify import scale_by, simplify

LOG2E = math.log2(math.e)


def split_scale(score: Expr) -> tuple[float | None, Expr]:
    """(scale, s) with score * log2(e) == scale * s; scale is None when the whole score carries the factor
    itself.

    A positive constant factor of the whole score stays out of s: exp2(scale * s - m) is one fused
    multiply-add and one exp2, and max(scale * s) = scale * max(s). A negative factor would turn the maximum
    into a minimum, so it is multiplied in first; one that a normal float32 cannot hold would be 0 or infinite
    there, and 0 * -inf is no maximum.
    """
    match simplify(scale_by(score, LOG2E)):
        case Dot() as dot:
            return LOG2E, dot
        case (
            Binary(op="*", left=rest, right=Const(value=factor))
            | Binary(op="*", left=Const(value=factor), right=rest)
        ) if 2.0**-126 <= factor < 2.0**128:
            return float(factor), rest
        case scaled:
            return None, scaled
