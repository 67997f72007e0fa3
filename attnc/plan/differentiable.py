"""Which attentions have a backward, what is said where a spec asks for gradients that it does not get, and
what the keys of a backward cannot ask for.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.diagnostics import Diagnostic, Label
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import PARTS, Schedule
from attnc.model.tensors import Tensor
from attnc.plan.fitting import unsupported
from attnc.plan.gradients import wanted_loads
from attnc.plan.key_rows import lay_in_rows
from attnc.plan.listed_rows import unites_blocks
from attnc.plan.lists import LEAST_TILE, adds_to_keys, listing_of, lists_blocks, selects_keys
from attnc.plan.signature import is_plain, normalise
from attnc.plan.target import Target
from attnc.plan.targets import TARGETS, target_of
from attnc.source import Span


def has_backward(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether the spec asks for gradients, and a backward can be generated: not for most kernels that
    decode, nor for targets that have none, or none where values are a prefix of the keys.
    """
    is_read, attention = _reads_keys(attention, schedule), lay_in_rows(attention)
    target = target_of(schedule.target)
    is_forward = not schedule.is_decode or (attention.v.storage.is_part and target.decodes_prompts)
    is_forward = is_forward or not target.refuse_wide_gradients(normalise(attention))
    if schedule.is_decode and lists_blocks(attention):
        is_forward = differentiates_selection(attention, schedule)
    return bool(attention.grads) and is_forward and is_read and can_differentiate(attention, target)


def leaves_gradients(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether gradients of keys that queries select, which a spec asks for, are left to kernels of
    another target, of what the forward leaves for them.
    """
    are_left = adds_to_keys(attention) or (bool(attention.grads) and unites_blocks(attention, schedule))
    return are_left and not target_of(schedule.target).has_selected_gradients


#: What to write for gradients in place of a schedule that decodes.
_OTHER_LOOPS = "to train, write a schedule with 'loops = [q, kv]', without split.kv and pack"
#: Forms of normalisation whose gradients the kernels make that select keys.
_SELECTED_FORMS = ("softmax", "softpick")


def differentiates_selection(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether there are kernels for gradients where every query selects keys by a list of its own:
    of q, k and v.
    """
    is_plain_call = set(attention.grads) <= {"q", "k", "v"} and attention.softmax.form in _SELECTED_FORMS
    has_kernels = target_of(schedule.target).has_selected_gradients and not _adds_to_other_rows(attention)
    return has_kernels and is_plain_call and selects_keys(attention, schedule)


def _adds_to_other_rows(attention: Attention) -> bool:
    """Returns whether packed queries have gradients of single keys that are not packed: the kernels that add
    to keys in turn know the queries of all sequences as rows, and so the keys.
    """
    return adds_to_keys(attention) and attention.q.storage.is_packed and not attention.k.storage.is_packed


def can_differentiate(attention: Attention, target: Target) -> bool:
    """Returns whether the target has kernels for gradients of tensors that are stored like these."""
    lacks = attention.v.storage.is_part and target.refuse_latent_gradients(normalise(attention))
    return target.has_backward and not lacks


def _reads_keys(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether kernels of gradients take k and v as they are stored."""
    if _find_narrow(attention) is None or attention.k.storage.is_paged:  # whose rows have 16 bits
        return True
    return not lists_blocks(attention) and target_of(schedule.target).differentiates_narrow(
        attention, schedule
    )


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
    narrow, is_read = _find_narrow(attention), _reads_keys(attention, schedule)
    attention = lay_in_rows(attention)
    target = target_of(schedule.target)
    if target.has_backward and attention.v.storage.is_part:
        lacks = target.refuse_latent_gradients(normalise(attention))
        if lacks:
            return attention.v.storage.span, lacks, _other_target(attention)
    if not target.has_backward:
        label = f"{schedule.target} has no backward kernels yet"
        return schedule.span or attention.span, label, _other_target(attention)
    if narrow is not None and not is_read:
        instead = "to train, write 'convert = before'"
        if lists_blocks(attention) or (schedule.is_decode and attention.v.storage.is_part):
            instead = "to train, pass 16 bits"
        elif not target.reads_narrow(schedule):
            instead = _other_target(attention)
        elif schedule.is_decode:  # whose kernel converts rows as they come
            instead = _OTHER_LOOPS
        return narrow.span, f"no kernel of gradients reads {narrow.dtype}", instead
    if schedule.is_decode and lists_blocks(attention) and not _has_tiles_of_lists(attention, target):
        return _without_selected_gradients(attention, schedule)
    place = next((knob.span for knob in schedule.decode_knobs), None)
    lacks = target.refuse_wide_gradients(normalise(attention))
    instead = _OTHER_LOOPS
    if lacks != Target.refuse_wide_gradients(target, attention):  # heads that such a schedule does not have
        instead = "to train, write a schedule for the target 'triton'"
    return place or attention.span, lacks, instead


def _has_tiles_of_lists(attention: Attention, target: Target) -> bool:
    """Returns whether kernels of the target that do not decode have gradients beside the lists of an
    attention: their tiles divide its blocks.
    """
    listing = listing_of(attention)
    if listing is None or not listing.rows or listing.rows % LEAST_TILE or listing.gathers:
        return False
    breaks_sticks = target.lists_are_bits and attention.softmax.form == "stick_breaking"
    return not (target.walks_for_groups or breaks_sticks)


def _other_target(attention: Attention) -> str:
    """Returns what to write where another target has the gradients, and where none has."""
    able = [name for name, target in TARGETS.items() if can_differentiate(attention, target)]
    if lists_blocks(attention):
        able = [name for name in able if TARGETS[name].has_selected_gradients]
    if able:
        return f"to train, add a schedule for {' or '.join(able[:2])}"
    if attention.v.storage.is_part:
        return "to train, give v an input of its own, without 'via prefix(k)': no target has these gradients"
    return "no target has these gradients"


def _without_selected_gradients(attention: Attention, schedule: Schedule) -> tuple[Span | None, str, str]:
    """What holds for every target comes first, so that its remedy is one."""
    others = [tensor for tensor in attention.inputs if tensor.name in set(attention.grads) - {"q", "k", "v"}]
    if others:
        label = "beside lists of single queries there are gradients of q, k and v"
        return others[0].span, label, f"to train, leave '{others[0].name}' out"
    if attention.softmax.form not in _SELECTED_FORMS:
        label = f"beside lists of single queries '{attention.softmax.form}' has no gradients"
        return attention.softmax.span, label, "to train, write 'normalize = softmax'"
    if not selects_keys(attention, schedule):
        label = "gradients are of lists that queries have of their own, with 'pack = gqa'"
        instead = "to train, give the lists an axis of queries, as in 'rows = 1'"
        return attention.mask.span, label, instead
    if _adds_to_other_rows(attention):
        label = "packed queries have gradients of single keys that are packed"
        return attention.q.storage.span, label, "to train, pack k and v, too"
    able = [name for name, other in TARGETS.items() if other.has_selected_gradients]
    instead = f"to train, add a schedule for {' or '.join(able)}"
    return attention.mask.span, "no gradients of keys that a list names", instead


def refuse_backward(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields what the backward phase asks for that its kernels cannot do."""
    attention = variant.attention
    if not has_backward(attention, schedule):
        return
    phases = ("backward", *PARTS["backward"])
    knobs = dict.fromkeys(knob for phase in phases for knob in schedule.phases[phase].values())
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
            case "accumulate.dq", (str(way), *_) if way != "two_pass" and (
                of := _makes_dq_apart(variant, schedule, target, way)
            ):
                yield unsupported(
                    f"dq of {of} is made by a pass of its own",
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


def refuse_narrow_gradients(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields gradients beside k or v of 8 bits that are sums over queries: their kernels read 16 bits."""
    attention = variant.attention
    narrow = _find_narrow(attention)
    if narrow is None or not has_backward(attention, schedule) or not _sums_over_queries(attention, schedule):
        return
    beside = f"beside {narrow.name} of {narrow.dtype}"
    yield unsupported(
        f"gradients of what keys have {beside} are not lowered to {schedule.target}",
        narrow.span,
        "kernels that sum over queries read 16 bits",
        "leave them out of 'grad', or pass 16 bits",
    )


def _find_narrow(attention: Attention) -> Tensor | None:
    stored = (attention.k, attention.v)
    return next((tensor for tensor in stored if DType(tensor.dtype).is_narrow), None)


def _sums_over_queries(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether a gradient is a sum over queries for each key, or dq one that such a kernel adds to."""
    of_keys = any(entry.along == ("kv",) for entry in wanted_loads(normalise(attention)))
    knob = schedule.phases["backward"].get("accumulate.dq")
    said = knob is not None and knob.choices != ("two_pass",)
    return of_keys or said or bool({"k", "v"} & set(attention.grads))


def _makes_dq_apart(variant: Variant, schedule: Schedule, target: Target, way: str) -> str:
    attention = variant.attention
    if attention.v.storage.is_part:
        return "keys whose columns are values"
    if attention.softmax.form == "stick_breaking":
        return "stick-breaking"
    if schedule.is_decode:
        return "heads that two warpgroups share"
    return "" if is_plain(attention) or target.adds_packed_dq(variant, way) else "packed sequences"


def refuse_rounded_gradients(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields the gradient of q in f32, where q is of another type: what sums it rounds it."""
    q = variant.attention.q
    if "q" in variant.attention.f32_grads and q.dtype is not DType.F32:
        yield unsupported(
            f"{schedule.target} writes the gradient of 'q' in the type of 'q'",
            q.span,
            f"is {q.dtype}, and its gradient wanted in f32",
            "write a Triton schedule, or 'grad q' without a type",
        )
