"""Strategies of the softmax: which a kernel can take, what each is in the plan, how far exponents are off.

A new strategy has its spelling in `model.knobs`, its meaning here, fields for kernels in `ir.Softmax`, and
steps in the templates of the targets that lower it; the others refuse it in their `check`.

Scores are in base 2, exp(x) = exp2(x * log2 e), with every constant folded where it costs nothing.

A unified maximum is FlashDecoding++'s (arXiv 2311.01282): one phi for all rows. With exp(s - phi) in
place of exp(s - m) partial sums need no maximum, no rescaling and no exchange: they are added. That is
right while the largest exponent of a row stays in a range [a, b]: above it sums overflow, below it
probabilities underflow in their own type. A split of the keys in which it does not is computed again with
a running maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnc.diagnostics import Diagnostic, error
from attnc.expr.construct import MAX_FLOAT, add, maximum, mul
from attnc.expr.finite import may_exclude
from attnc.expr.functions import REAL
from attnc.expr.nodes import Binary, Call, Const, Dim, Dot, Expr, Index, Neg, children, rebuild
from attnc.expr.simplify import scale_by, simplify
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.knobs import ONLINE
from attnc.model.schedule import Choice, ForwardConfig, Knob, Schedule
from attnc.plan.fitting import unsupported
from attnc.plan.ir import Dropout, Softmax
from attnc.plan.ir.kernel import UnifiedMax
from attnc.plan.loads import LoadNames
from attnc.plan.target import Target

#: log2 of how far a maximum of f16 probabilities may grow unseen: they reach 2^14, and the row's largest
#: should have all of its bits even before that.
_F16_HEADROOM = 12.0
#: log2 of the most probabilities that a thread, and a row of a tile, sums before it looks at the sum.
_SUM_OF_TILE = 8.0


# --- which strategies a kernel can take


def check_softmax(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields every strategy of the schedule that does not suit its loops, or that no kernel of the target
    has.
    """
    knobs = schedule.forward
    knob, loops = knobs.get("softmax"), knobs.get("loops")
    if variant.attention.softmax.form == "stick_breaking":
        yield from _check_sticks(schedule)
        return
    if not variant.attention.normalises:
        yield from _check_absent(variant, schedule)
        return
    if variant.attention.softmax.form == "softpick":
        yield from _check_softpick(variant, schedule)
    if knob is None:
        return
    if not target.has_lazy_maximum and any("maximum" in choice.args for choice in _list_choices(knob)):
        label = "'cuda.sm_90a' has it alone"
        hint = "write 'online(rescale = lazy(8))', or 'online'"
        yield unsupported("a lazy maximum is not lowered to this target", knob.span, label, hint)
    if schedule.is_decode:
        yield from _check_decode(variant, knob)
        if variant.attention.softmax.scales_keys and any(
            choice.name == "unified_max" for choice in _list_choices(knob)
        ):
            label = "probabilities use all of the range of their type"
            hint = "write 'softmax = online', or give v one scale for all keys"
            message = "a unified maximum leaves no room for a scale of v that differs from key to key"
            yield unsupported(message, knob.span, label, hint)
        elif variant.attention.softmax.dropout is not None and any(
            choice.name == "unified_max" for choice in _list_choices(knob)
        ):
            label = "nothing is drawn beside it"
            message = "a unified maximum beside dropout is not lowered"
            yield unsupported(message, knob.span, label, "write 'softmax = online'")
    elif any(choice.name == "unified_max" for choice in _list_choices(knob)):
        yield unsupported(
            "a unified maximum belongs to the decode kernel",
            knob.span,
            "with many q rows a running maximum costs nothing",
            "write 'loops = [kv]', or 'softmax = online'",
        )
    if loops is not None and ("kv", "q") in loops.choices:
        for value in knob.choices:
            if not (isinstance(value, Choice) and value.args.get("rescale") == "every_step"):
                yield unsupported(
                    "loops = [kv, q] needs softmax = online(rescale = every_step)",
                    knob.span,
                    "o lies in memory, normalised, between two visits",
                    "write 'softmax = online(rescale = every_step)', as FlashAttention-1 does",
                )


def _check_softpick(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    knob, loops = schedule.forward.get("softmax"), schedule.forward.get("loops")
    choices = () if knob is None else _list_choices(knob)
    if knob is not None and any("maximum" in choice.args for choice in choices):
        label = "rows divide by differences of exponentials, which a sum does not watch"
        yield unsupported("softpick has no lazy maximum", knob.span, label, "write 'softmax = online'")
    elif knob is not None and any(choice.name == "unified_max" for choice in choices):
        label = "of differences of exponentials, a wrong guess leaves nothing"
        yield unsupported("softpick has no unified maximum", knob.span, label, "write 'softmax = online'")
    if loops is not None and ("kv", "q") in loops.choices:
        label = "o lies in memory between two visits"
        yield unsupported("loops = [kv, q] has no softpick", loops.span, label, "write 'loops = [q, kv]'")


def _check_sticks(schedule: Schedule) -> Iterator[Diagnostic]:
    knob, loops = schedule.forward.get("softmax"), schedule.forward.get("loops")
    if knob is not None:
        label = "'stick_breaking' has no maximum and no denominator"
        yield unsupported("there is no softmax to schedule", knob.span, label, "remove it")
    if loops is not None and ("kv", "q") in loops.choices:
        label = "o lies in memory between two visits"
        yield unsupported(
            "loops = [kv, q] has no stick_breaking", loops.span, label, "write 'loops = [q, kv]'"
        )


def _check_absent(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    knob, span = schedule.forward.get("softmax"), variant.attention.softmax.span
    loops = schedule.forward["loops"].choices if "loops" in schedule.forward else ()
    if knob is not None:
        label = "'normalize = none' has no maximum and no denominator"
        yield unsupported("there is no softmax to schedule", knob.span, label, "remove it")
    if ("kv", "q") in loops:
        label, instead = "this loop order rescales parts of o", "write 'loops = [q, kv]'"
        yield unsupported("loops = [kv, q] has no 'normalize = none'", span, label, instead)


def _list_choices(knob: Knob) -> tuple[Choice, ...]:
    return tuple(choice for choice in knob.choices if isinstance(choice, Choice))


def _check_decode(variant: Variant, knob: Knob) -> Iterator[Diagnostic]:
    match knob.choices[0]:
        case Choice(name="unified_max", args={"fallback": fallback}):
            yield from check_bounds(variant, knob)
            if fallback != ONLINE:
                label = "after a unified maximum"
                yield unsupported("the fallback is an online softmax", knob.span, label, "= online")
        case Choice(name="two_pass") | Choice(args={"rescale": "every_step"}):
            label = "with split.kv or pack"
            yield unsupported("the decode kernel rescales deferred or lazily", knob.span, label)


# --- what a strategy is in the plan


def plan_softmax(
    attention: Attention,
    config: ForwardConfig,
    names: LoadNames,
    of_row: Callable[[Expr], Expr] = lambda expr: expr,
) -> tuple[Softmax, Expr | None]:
    """Returns the softmax, and the score it reads (None: the raw dot product). of_row: makes the head of what
    is folded one of a row. Which constants are folded where may depend on what rows have in common, so that a
    kernel whose rows have several heads folds like others only where it does so before.
    """
    if attention.softmax.form == "none":
        return _plan_weights(attention, names)
    scale, raw = split_scale(attention.score)
    raw = of_row(raw)
    choice = config.softmax
    rescale = choice.args.get("rescale", "deferred")
    if config.loops == ("kv", "q"):
        rescale = "every_step"  # o lies in memory, normalised, between two visits
    threshold = 0.0
    _, most = safe_range(attention.element)
    if isinstance(rescale, Choice):
        (value,) = rescale.args.values()
        rescale = rescale.name
        threshold = min(float(value), most * LOG2E) if isinstance(value, int | float) else 0.0
    wanted = attention.softmax
    softmax = Softmax(
        kind="two_pass" if choice.name == "two_pass" else "online",
        rescale=rescale,  # type: ignore[arg-type]  # one of the three names, by the schedule's rules
        threshold=threshold,
        scale=scale,
        safe_everywhere=may_exclude(raw) or attention.k_scale is not None,  # which may be infinite
        sink=None if wanted.sink is None else names.replace(of_row(scale_by(wanted.sink, LOG2E))),
        dropout=plan_dropout(attention, names),
        headroom=headroom_of(choice, attention.element),
        v_scale=None if wanted.of_rows is None else names.replace(of_row(wanted.of_rows)),
        form=wanted.form,
    )
    return softmax, None if isinstance(raw, Dot) else names.replace(raw)


def plan_key_scale(attention: Attention, names: LoadNames) -> Expr | None:
    """Returns the scale of v that differs from key to key, if there is one."""
    wanted = attention.softmax
    return names.replace(wanted.v_scale) if wanted.v_scale is not None and wanted.scales_keys else None


def _plan_weights(attention: Attention, names: LoadNames) -> tuple[Softmax, Expr | None]:
    weights = split_weight(attention, at_end=True)
    absent = Softmax(
        kind="online",
        rescale="deferred",
        threshold=0.0,
        scale=None,
        safe_everywhere=False,
        sink=None,
        dropout=None,
        v_scale=None if weights.factor is None else names.replace(weights.factor),
        form="none",
    )
    return absent, None if isinstance(weights.rest, Dot) else names.replace(weights.rest)


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """What a key counts: rest * factor, a number of the sequence that is at most 1; None: 1."""

    rest: Expr
    factor: Expr | None


def split_weight(attention: Attention, *, at_end: bool) -> SplitWeight:
    """Returns the weight of a key under `normalize = none`, and its division. A division by a size, as in
    `silu(score) / N`, is done once at the end, where results are multiplied anyway. Without such a place, and
    for f16, which weights might overflow without it, each weight is multiplied by the reciprocal.
    """
    match attention.score:
        case Binary(op="/", left=rest, right=Dim() | Const(value=int()) as size) if _is_size(size):
            # an empty sequence has no weights, and 0 / 0 is no 0
            factor: Expr = Binary("/", Const(1.0), maximum(size, Const(1)))
            rest = _multiply_by_reciprocals(simplify(rest))
            if attention.element is DType.F16 or not at_end:
                return SplitWeight(Binary("*", rest, factor), None)
            return SplitWeight(rest, factor)
        case whole:
            return SplitWeight(_multiply_by_reciprocals(simplify(whole)), None)


def _multiply_by_reciprocals(expr: Expr) -> Expr:
    expr = rebuild(expr, tuple(map(_multiply_by_reciprocals, children(expr))))
    match expr:
        case Binary(op="/", left=left, right=Const(value=value)) if value and left.type == "float":
            return mul(left, Const(1.0 / value))
        case _:
            return expr


def _is_size(size: Expr) -> bool:
    return isinstance(size, Dim) or (isinstance(size, Const) and size.value >= 1)


def plan_dropout(attention: Attention, names: LoadNames) -> Dropout | None:
    """Returns the dropout of an attention, None if it has none."""
    wanted = attention.softmax
    if wanted.dropout is None or wanted.seed is None:
        return None
    head: Expr = Index("h")
    if wanted.first_head is not None:
        head = add(head, wanted.first_head)
    return Dropout(p=names.replace(wanted.dropout), seed=names.replace(wanted.seed), head=names.replace(head))


# --- what it does to the error


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """largest: how far what exponents subtract may be from the row's maximum; least_probability: what the
    row's largest probability may be stored as; most_probability: what any probability may be.
    """

    largest: float = 0.0
    least_probability: float = 1.0
    most_probability: float = 1.0


def shift_of(softmax: Softmax, unified: UnifiedMax | None, p: DType, *, scales_keys: bool) -> Shift:
    """Returns how far the exponents of a kernel are off; p: the type of probabilities; scales_keys: they are
    multiplied by a scale of v.
    """
    if unified is not None:
        largest = (abs(unified.phi) + max(abs(unified.low), abs(unified.high))) / LOG2E
        return Shift(largest=largest, least_probability=2.0**unified.low)
    if softmax.headroom:
        # A lazy maximum may lie below the row's by the headroom, and what is subtracted above it by as much
        # and by the sum of a tile; p is a power of two smaller, which matters where that is subnormal.
        off = softmax.headroom + _SUM_OF_TILE
        top = top_of(p, scales_keys=scales_keys)
        return Shift(largest=off, least_probability=2.0 ** (top - off), most_probability=2.0**top)
    return Shift(most_probability=2.0**softmax.threshold)


def headroom_of(softmax: Choice, p: DType) -> float:
    """Returns `ir.Softmax.headroom` under a choice of a schedule, with probabilities of this type."""
    maximum = softmax.args.get("maximum")
    if not isinstance(maximum, Choice):
        return 0.0
    (value,) = maximum.args.values()
    most = _F16_HEADROOM if p is DType.F16 else -safe_range(p)[0] * LOG2E - _SUM_OF_TILE
    return min(value, most) if isinstance(value, float) else 0.0


def top_of(p: DType, *, scales_keys: bool) -> int:
    """Returns log2 of what p may reach under a lazy maximum: f16 has few exponents, and is used up to its
    largest, or, where p is multiplied by a scale of v, up to 1/256 of it.
    """
    if p is not DType.F16:
        return 0
    return 8 if scales_keys else 14


# --- one maximum for all rows


#: What sums are laid out for: keys of a sequence, and the size of a value.
LONGEST, LARGEST_VALUE = 2.0**20, 2.0**16
#: Factors below a row's largest probability that must still be exact in its type.
HEADROOM = 2.0**8


def safe_range(dtype: DType) -> tuple[float, float]:
    """Returns the exponents between which a row's largest may lie, for probabilities and values
    of this type.
    """
    sums = math.log(DType.F32.largest) - math.log(LONGEST) - math.log(LARGEST_VALUE)
    return math.log(dtype.smallest_normal * HEADROOM), min(math.log(dtype.largest), sums)


def check_bounds(variant: Variant, knob: Knob) -> Iterator[Diagnostic]:
    """Yields E0604 where the bounds that a schedule gives are not safe for the type of P and V."""
    dtype = variant.attention.element
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
    """Returns the unified maximum that a config asks for; its fallback is dropped where the score cannot
    leave the bounds.
    """
    choice = config.softmax
    if choice.name != "unified_max":
        return None
    phi = choice.args["phi"]
    assert isinstance(phi, float)
    a, b = bounds_of(choice)
    low, high = score_range(attention.score)
    inside = phi + a <= low and high <= phi + b and attention.softmax.sink is None
    phi = max(min(phi * LOG2E, MAX_FLOAT), -MAX_FLOAT)
    return UnifiedMax(phi=phi, low=a * LOG2E, high=b * LOG2E, fallback=not inside)


def bounds_of(choice: Choice) -> tuple[float, float]:
    """Returns where a row's largest exponent may lie, in natural units."""
    bounds = choice.args["bounds"]
    assert isinstance(bounds, tuple)
    a, b = bounds
    assert isinstance(a, float)
    assert isinstance(b, float)
    return a, b


def score_range(score: Expr) -> tuple[float, float]:
    """Returns between which numbers the score lies, whatever its inputs; infinite where nothing bounds it."""
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


# --- scores in base 2


LOG2E = math.log2(math.e)


def split_scale(score: Expr) -> tuple[float | None, Expr]:
    """Returns (scale, s) with score * log2(e) == scale * s; scale is None when the whole score carries the
    factor itself.

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
