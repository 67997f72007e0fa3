"""Strategies of the softmax: which a kernel can take, what each is in the plan, how far exponents are off.

A new one is spelled in `model.knobs`, is told here what it means, has fields in `ir.Softmax` for what kernels
have to know, and steps in the templates of the targets that lower it; the others refuse it in their `check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attnc.diagnostics import Diagnostic
from attnc.expr.construct import add
from attnc.expr.nodes import Dot, Expr, Index
from attnc.expr.simplify import scale_by
from attnc.model.attention import Attention, Variant
from attnc.model.knobs import ONLINE
from attnc.model.schedule import Choice, ForwardConfig, Knob, Schedule, knobs_of
from attnc.model.tensors import DType
from attnc.plan.fitting import unsupported
from attnc.plan.ir import Dropout, Softmax
from attnc.plan.ir.decode import UnifiedMax, is_decode
from attnc.plan.loads import LoadNames
from attnc.plan.poles import may_exclude
from attnc.plan.scores import LOG2E, split_scale
from attnc.plan.target import Target
from attnc.plan.unified_max import check_bounds

#: log2 of how far a maximum of f16 probabilities may grow unseen: they reach 2^14, and the row's largest
#: should have all of its bits even before that.
_F16_HEADROOM = 12.0
#: log2 of the most probabilities that a thread, and a row of a tile, sums before it looks at the sum.
_SUM_OF_TILE = 8.0


# --- which strategies a kernel can take


def check_softmax(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Every strategy of the schedule that does not suit its loops, or that no kernel of the target has."""
    knobs = knobs_of(schedule, "forward")
    knob, loops = knobs.get("softmax"), knobs.get("loops")
    if knob is None:
        return
    if not target.has_lazy_maximum and any("maximum" in choice.args for choice in _named(knob)):
        label = "'cuda.sm_90a' has it alone"
        hint = "write 'online(rescale = lazy(8))', or 'online'"
        yield unsupported("a lazy maximum is not lowered to this target", knob.span, label, hint)
    if is_decode(schedule):
        yield from _of_decode(variant, knob)
    elif any(choice.name == "unified_max" for choice in _named(knob)):
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


def _named(knob: Knob) -> Iterator[Choice]:
    return (choice for choice in knob.choices if isinstance(choice, Choice))


def _of_decode(variant: Variant, knob: Knob) -> Iterator[Diagnostic]:
    """The decode kernel looks at the first strategy of a schedule."""
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
    attention: Attention, config: ForwardConfig, names: LoadNames
) -> tuple[Softmax, Expr | None]:
    """The softmax, and the score it reads (None: the raw dot product)."""
    scale, raw = split_scale(attention.score)
    choice = config.softmax
    rescale = choice.args.get("rescale", "deferred")
    if config.loops == ("kv", "q"):
        rescale = "every_step"  # o lies in memory, normalised, between two visits
    threshold = 0.0
    if isinstance(rescale, Choice):
        (value,) = rescale.args.values()
        rescale, threshold = rescale.name, value if isinstance(value, int | float) else 0.0
    headroom = 0.0
    if isinstance(maximum := choice.args.get("maximum"), Choice):
        (value,) = maximum.args.values()
        most = _F16_HEADROOM if attention.v.dtype is DType.F16 else math.inf
        headroom = min(value, most) if isinstance(value, float) else 0.0
    wanted = attention.softmax
    softmax = Softmax(
        kind="two_pass" if choice.name == "two_pass" else "online",
        rescale=rescale,  # type: ignore[arg-type]  # one of the three names, by the schedule's rules
        threshold=float(threshold),
        scale=scale,
        safe_everywhere=may_exclude(raw),
        sink=None if wanted.sink is None else scale_by(names.replace(wanted.sink), LOG2E),
        dropout=plan_dropout(attention, names),
        headroom=headroom,
    )
    return softmax, None if isinstance(raw, Dot) else names.replace(raw)


def plan_dropout(attention: Attention, names: LoadNames) -> Dropout | None:
    """What is dropped, if anything is."""
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
    row's largest probability may be stored as.
    """

    largest: float = 0.0
    least_probability: float = 1.0


def shift_of(softmax: Softmax, unified: UnifiedMax | None, p: DType) -> Shift:
    """How far the exponents of a kernel are off; p: the type of probabilities."""
    if unified is not None:
        largest = (abs(unified.phi) + max(abs(unified.low), abs(unified.high))) / LOG2E
        return Shift(largest=largest, least_probability=2.0**unified.low)
    if softmax.headroom:
        # A lazy maximum may lie below the row's by the headroom, and what is subtracted above it by as much
        # and by the sum of a tile; p is a power of two smaller, which matters where that is subnormal.
        off = softmax.headroom + _SUM_OF_TILE
        return Shift(largest=off, least_probability=2.0 ** (top_of(p) - off))
    return Shift()


def top_of(p: DType) -> int:
    """log2 of what p may reach under a lazy maximum: f16 has few exponents, and is used up to its largest."""
    return 14 if p is DType.F16 else 0
