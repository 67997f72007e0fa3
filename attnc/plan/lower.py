"""Variant + schedule -> Module: the one entry of this package.

What a target cannot lower is said first, at its span, before any planning; nothing is ever silently
different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnc.diagnostics import Diagnostic, DiagnosticError, Label
from attnc.expr.nodes import uses
from attnc.model.attention import Attention, Variant
from attnc.model.configs import schedule_of
from attnc.model.knobs import KEYS
from attnc.model.schedule import PARTS, Choice, Knob, Schedule, knobs_of
from attnc.model.tensors import DType
from attnc.plan.backward import plan_backward
from attnc.plan.decode import plan_decode
from attnc.plan.fitting import unsupported
from attnc.plan.forward import plan_forward
from attnc.plan.gradients import wanted_loads
from attnc.plan.ir import Module
from attnc.plan.ir.kernel import decode_knobs, is_decode
from attnc.plan.names import cannot_be_called, cannot_be_passed
from attnc.plan.signature import arguments, capacity, has_rows, is_plain, kept, normalise, results, unbound
from attnc.plan.softmax import check_softmax
from attnc.plan.target import Target
from attnc.plan.targets import INSTEAD, TARGETS, target_of
from attnc.plan.verify import verify_module
from attnc.source import Span


def plan(variant: Variant, schedule: Schedule) -> Module:
    """Returns all kernels of a variant under a schedule.

    Raises DiagnosticError with every reason why the schedule's target cannot compile it.
    """
    schedule = schedule_of(schedule, variant)
    problems = tuple(check_lowerable(variant, schedule))
    if problems:
        raise DiagnosticError(problems)
    attention = normalise(variant.attention)
    plan_kernel = plan_decode if is_decode(schedule) else plan_forward
    differentiable = has_backward(attention, schedule)
    kernel = plan_kernel(variant, attention, schedule)
    module = Module(
        variant=variant,
        target=schedule.target,
        args=arguments(variant.attention),
        sizes=capacity(attention),
        outputs=results(attention),
        kernel=kernel,
        kept=kept(attention) if differentiable else (),
        label=schedule.label,
        backward=plan_backward(variant, attention, schedule, kernel) if differentiable else None,
    )
    verify_module(module)
    return module


# --- what a target cannot lower


def check_lowerable(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields every reason why this target cannot compile this variant under this schedule."""
    target = TARGETS.get(schedule.target)
    if target is None:
        yield unsupported(f"'{schedule.target}' has no kernels yet", schedule.span, "for it", INSTEAD)
        return
    yield from _names(variant, schedule)
    knobs = knobs_of(schedule, "forward")
    yield from _sizes(variant)
    yield from _of_others(schedule, knobs)
    yield from _narrow(variant, target)
    yield from target.check(variant, schedule)
    if combine := knobs_of(schedule, "combine"):
        for knob in combine.values():
            yield unsupported(
                f"the combine kernel has nothing to configure for {schedule.target}",
                knob.span,
                "one row per program",
                "remove it",
            )
    if is_decode(schedule):
        yield from _decode(variant, knobs)
    yield from check_softmax(variant, schedule, target)
    yield from _backward(variant, schedule, target)
    if not target.has_f32_dq:
        yield from _gradient_types(variant, schedule)
    loops = knobs.get("loops")
    if loops and ("kv", "q") in loops.choices:
        yield from _storages(variant)
        yield from _row_scale(variant)


def _gradient_types(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields the gradient of q in f32, where q is of another type: what sums it rounds it."""
    q = variant.attention.q
    if "q" in variant.attention.f32_grads and q.dtype is not DType.F32:
        yield unsupported(
            f"{schedule.target} writes the gradient of 'q' in the type of 'q'",
            q.span,
            f"is {q.dtype}, and its gradient wanted in f32",
            "write a Triton schedule, or 'grad q' without a type",
        )


def _narrow(variant: Variant, target: Target) -> Iterator[Diagnostic]:
    """Yields a refusal of keys and values of 8 bits, and of a scale of v, by targets that have neither."""
    attention = variant.attention
    if target.reads_narrow:
        return
    instead = "write a schedule for the target 'triton'"
    for tensor in (attention.k, attention.v):
        if DType(tensor.dtype).is_narrow:
            label = "these kernels multiply it as it was copied"
            message = f"{tensor.name} of {tensor.dtype} is not lowered to {target.name}"
            yield unsupported(message, tensor.span, label, instead)
    if attention.softmax.v_scale is not None:
        label = "o leaves as it is divided by the row's sum"
        yield unsupported(
            f"a scale of v is not lowered to {target.name}", attention.softmax.span, label, instead
        )


def _of_others(schedule: Schedule, knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    """Yields a refusal of keys that only one target has."""
    for knob in knobs.values():
        target = KEYS[knob.key].target if knob.key in KEYS else ""
        if target not in ("", schedule.target):
            label = f"'{target}' has it alone"
            yield unsupported(f"'{knob.key}' is no key of '{schedule.target}'", knob.span, label, "remove it")


def _decode(variant: Variant, knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    """Yields what the decode kernel cannot do: it has one loop over the keys, and rows from one sequence."""
    attention = variant.attention
    for key in ("loops", "persistent", "order"):
        knob = knobs.get(key)
        if knob is None:
            continue
        match key, knob.choices[0]:
            case "loops", ("kv", "q"):
                label = "a query tile would lose its place in the loop over the keys"
                yield unsupported("loops = [kv, q] cannot pack or split", knob.span, label)
            case "persistent", True:
                yield unsupported("the decode kernel is not persistent", knob.span, "with split.kv or pack")
            case "order", "longest_first":
                label = "few q tiles, all as long"
                yield unsupported("the decode kernel has no order of q tiles", knob.span, label)
    yield from _whole_splits(knobs)
    if attention.q.storage.is_packed:
        span = attention.q.storage.span
        yield unsupported("split.kv and pack need q to be an ordinary tensor", span, "q is packed here")
    if attention.softmax.dropout is not None:
        yield unsupported(
            "the decode kernel has no dropout", attention.softmax.span, "a probability is drawn to be dropped"
        )


def _whole_splits(knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    """Yields a refusal where splits of a fixed number of keys are not made of whole tiles."""
    tiles = knobs["tile.kv"].choices if "tile.kv" in knobs else (64,)
    split = knobs.get("split.kv")
    for choice in split.choices if split else ():
        match choice:
            case Choice(name="fixed", args={"size": int() as size}):
                cut = [tile for tile in tiles if isinstance(tile, int) and size % tile]
                if cut and split:
                    yield unsupported(
                        f"splits of {size} keys are not made of whole tiles of {cut[0]}",
                        split.span,
                        "a split begins and ends with a tile",
                        f"write a multiple of {max(tile for tile in tiles if isinstance(tile, int))}",
                    )


def has_backward(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether the spec asks for gradients, and a backward can be generated: not for decoding, nor for
    keys in pages or values that are a prefix of them, nor for targets that have none.
    """
    can_be = has_rows(attention) and target_of(schedule.target).has_backward
    return bool(attention.grads) and not is_decode(schedule) and can_be


def check_differentiable(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields a warning where the spec asks for gradients that are not generated."""
    attention = variant.attention
    if not attention.grads or has_backward(attention, schedule):
        return
    span, reason, instead = _without_backward(attention, schedule)
    if span is not None:
        yield Diagnostic(
            code="W0802",
            severity="warning",
            message=f"gradients of '{attention.name}' are not generated for {schedule.target}",
            primary=Label(span, reason),
            notes=("the generated callable refuses tensors that require a gradient",),
            hints=(instead, "or call it under torch.no_grad(), or on detached tensors"),
        )


def _without_backward(attention: Attention, schedule: Schedule) -> tuple[Span | None, str, str]:
    """Returns where it is said that there are no gradients, why, and what has them."""
    for tensor in (attention.k, attention.v):
        if not tensor.storage.has_gradients:
            what = "keys and values in pages" if tensor.storage.is_paged else "a prefix of k"
            rows = "to train, store k and v as tensors of their own, or packed ('via ragged(...)')"
            return tensor.storage.span, f"{what}: there are no gradients of such memory", rows
    if not target_of(schedule.target).has_backward:
        label = f"{schedule.target} has no backward kernels yet"
        return schedule.span or attention.span, label, "to train, add a schedule for triton or cuda.sm_80"
    place = next((knob.span for knob in decode_knobs(schedule)), None)
    instead = "to train, write a schedule with 'loops = [q, kv]', without split.kv and pack"
    return place or attention.span, "the decode kernel has no backward", instead


def _backward(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields what the backward phase asks for that its kernels cannot do."""
    attention = variant.attention
    if not has_backward(attention, schedule):
        return
    phases = ("backward", *PARTS["backward"])
    knobs = dict.fromkeys(knob for phase in phases for knob in knobs_of(schedule, phase).values())
    scattered = {entry.load.tensor for entry in wanted_loads(normalise(attention)) if entry.places is None}
    for knob in knobs:
        yield from target.check_backward(knob)
        if knob.key.startswith("accumulate.") and len(knob.choices) > 1:
            yield unsupported(
                "one way to sum a gradient for all configs", knob.span, "decides which kernels there are"
            )
        match knob.key, knob.choices:
            case "loops", choices if choices != (("kv", "q"),):
                yield unsupported(
                    "the backward walks over K/V blocks first, and over Q blocks inside",
                    knob.span,
                    "this order cannot be asked for",
                    "write 'loops = [kv, q]'; with 'accumulate.dq = sequential' it is FlashAttention-1's",
                )
            case "accumulate.dq", (str(way), *_) if way != "two_pass" and not is_plain(attention):
                yield unsupported(
                    "dq of packed sequences is made by a pass of its own",
                    knob.span,
                    f"'{way}' cannot be asked for",
                    "write 'accumulate.dq = two_pass'",
                )
            case "accumulate.dq", ("ordered", *_):
                yield from target.check_turns(variant, schedule, knob)
            case "persistent", (True, *_):
                yield unsupported("the backward's programs are not persistent", knob.span, "here")
            case str(key), ("two_pass", *_) if key.removeprefix("accumulate.d") in scattered:
                yield unsupported(
                    f"the gradient of '{key.removeprefix('accumulate.d')}' has to be scattered",
                    knob.span,
                    "its index is not one of b, h, q_idx, q_pos and kv_idx",
                    "write 'atomic', which is what a schedule that says nothing gets",
                )


def _storages(variant: Variant) -> Iterator[Diagnostic]:
    for tensor in variant.attention.inputs:
        if not tensor.storage.is_plain:
            yield unsupported(
                f"loops = [kv, q] needs ordinary tensors, and {tensor.name} is {tensor.storage.name}",
                tensor.storage.span,
                "of this input",
                "write 'loops = [q, kv]'",
            )


def _row_scale(variant: Variant) -> Iterator[Diagnostic]:
    softmax = variant.attention.softmax
    if softmax.v_scale is not None and "q_idx" in uses(softmax.v_scale):
        yield unsupported(
            "loops = [kv, q] needs one scale of v for all queries of a head",
            softmax.v_scale.span or softmax.span,
            "differs from query to query",
            "write 'loops = [q, kv]'",
        )


def _names(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields a refusal of names that mean something else in the interface of the generated module."""
    attention = variant.attention
    named = [("attention", attention.name, attention.span)] if cannot_be_called(attention.name) else []
    named += [
        ("input", tensor.name, tensor.span)
        for tensor in attention.inputs
        if cannot_be_passed(tensor.name, attention, schedule)
        or tensor.name in target_of(schedule.target).own_tensors
    ]
    for what, name, span in named:
        yield unsupported(
            f"the {what} cannot be called '{name}' in a generated module",
            span,
            "its interface has a name like this",
            "give it another name",
        )


def _sizes(variant: Variant) -> Iterator[Diagnostic]:
    attention = variant.attention
    for name in sorted(unbound(arguments(attention)) - {size.name for size in capacity(attention)}):
        culprit = next(t for t in attention.inputs if any(name in str(size) for size in t.shape))
        yield unsupported(
            f"the size '{name}' cannot be inferred from the arguments",
            culprit.span,
            f"'{name}' appears only inside a product or a sum",
            f"give some input an axis of size '{name}' alone",
        )
