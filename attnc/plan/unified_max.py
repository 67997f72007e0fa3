"""FlashDecoding++ (arXiv 2311.01282): one maximum phi for all rows, and the range of scores that is safe.

With exp(s - phi) in place of exp(s - m) partial sums need no maximum, no rescaling and no exchange: they are
added. That is right while the largest exponent of a row stays in a range [a, b]: above it sums overflow,
below it probabilities underflow in their own type. A split of the keys in which it does not is computed again
with a running maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from attnc.diagnostics import Diagnostic, error
from attnc.expr.functions import REAL
from attnc.expr.nodes import Binary, Call, Const, Expr, Neg
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Choice, ForwardConfig, Knob
from attnc.model.tensors import DType
from attnc.plan.ir.decode import UnifiedMax
from attnc.plan.scores import LOG2E

#: What sums are laid out for: keys of a sequence, and the size of a value.
LONGEST, LARGEST_VALUE = 2.0**20, 2.0**16
#: Factors below a row's largest probability that must still be exact in its type.
HEADROOM = 2.0**8
_LARGEST = {DType.F16: 65504.0, DType.BF16: 3.38e38, DType.F32: 3.4e38}
_SMALLEST_NORMAL = {DType.F16: 2.0**-14, DType.BF16: 2.0**-126, DType.F32: 2.0**-126}


def safe_range(dtype: DType) -> tuple[float, float]:
    """The exponents between which a row's largest may lie, for probabilities and values of this type."""
    sums = math.log(_LARGEST[DType.F32]) - math.log(LONGEST) - math.log(LARGEST_VALUE)
    return math.log(_SMALLEST_NORMAL[dtype] * HEADROOM), min(math.log(_LARGEST[dtype]), sums)


def check_bounds(variant: Variant, knob: Knob) -> Iterator[Diagnostic]:
    """E0604 where the bounds that a schedule gives are not safe for the type of P and V."""
    dtype = DType(variant.attention.v.dtype)
    low, high = safe_range(dtype)
    for choice in knob.choices:
        if isinstance(choice, Choice) and choice.name == "unified_max" and knob.span is not None:
            a, b = bounds_of(choice)
            if a < low or b > high:
                shown = f"[{math.ceil(low * 10) / 10:g}, {math.floor(high * 10) / 10:g}]"
                yield error(
                    "E0604",
                    f"bounds = [{a:g}, {b:g}] are not safe with probabilities in {dtype}",
                    knob.span,
                    "exp(s - phi) overflows or loses its digits there",
                    hints=(f"{shown} is safe for up to 2**20 keys and values up to 65536",),
                )


def unified_max(attention: Attention, config: ForwardConfig) -> UnifiedMax | None:
    """The unified maximum that a config asks for; its fallback is dropped where the score cannot leave the
    bounds.
    """
    choice = config.softmax
    if choice.name != "unified_max":
        return None
    phi = choice.args["phi"]
    assert isinstance(phi, float)
    a, b = bounds_of(choice)
    low, high = score_range(attention.score)
    inside = phi + a <= low and high <= phi + b and attention.softmax.sink is None
    return UnifiedMax(phi=phi * LOG2E, low=a * LOG2E, high=b * LOG2E, fallback=not inside)


def bounds_of(choice: Choice) -> tuple[float, float]:
    """Where a row's largest exponent may lie, in natural units."""
    bounds = choice.args["bounds"]
    assert isinstance(bounds, tuple)
    a, b = bounds
    assert isinstance(a, float)
    assert isinstance(b, float)
    return a, b


def score_range(score: Expr) -> tuple[float, float]:
    """Between which numbers the score lies, whatever its inputs; infinite where nothing bounds it."""
    match score:
        case Const(value=int() | float() as value):
            return float(value), float(value)
        case Call(function=function) if function in REAL:
            return REAL[function].low, REAL[function].high
        case Neg(operand=operand):
            low, high = score_range(operand)
            return -high, -low
        case Binary(op="+" | "-" as op, left=left, right=right):
            (a, b), (c, d) = score_range(left), score_range(right)
            return (a + c, b + d) if op == "+" else (a - d, b - c)
        case Binary(op="*", left=left, right=right):
            ends = [_product(x, y) for x in score_range(left) for y in score_range(right)]
            return min(ends), max(ends)
        case Binary(op="/", left=left, right=Const(value=int() | float() as value)) if value != 0:
            ends = [x / value for x in score_range(left)]
            return min(ends), max(ends)
        case Call(function="min" | "max" as function, args=args):
            choose = min if function == "min" else max
            lows, highs = zip(*map(score_range, args), strict=True)
            return choose(lows), choose(highs)
        case _:
            return -math.inf, math.inf


def _product(x: float, y: float) -> float:
    return 0.0 if 0.0 in (x, y) else x * y
