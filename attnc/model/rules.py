"""Checks of what resolved: one idea each, over an attention as written and as resolved, or over all
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from attnc.diagnostics import Label, Reporter
from attnc.expr.nodes import Binary, Const, Dim, Expr, InList, Load, Param, walk
from attnc.model.attention import Attention
from attnc.model.columns import is_shared
from attnc.model.declarations import MAX_HEAD_DIM
from attnc.model.dtypes import DType
from attnc.model.schedule import PARTS, Schedule
from attnc.model.scope import list_names
from attnc.model.tensors import Tensor
from attnc.syntax import ast

AttentionRule: TypeAlias = Callable[[ast.Attention, Attention, Reporter], None]
ScheduleRule: TypeAlias = Callable[[Sequence[Schedule], Mapping[str, Attention], Reporter], None]


def check_head_dims(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports head dimensions that are not 1 to 1024."""
    sizes = {attention.q.shape[-1]: "D"}
    sizes.setdefault(attention.v.shape[-1], "Dv")
    for size, name in sizes.items():
        for value in _values(size, attention):
            if not 1 <= value <= MAX_HEAD_DIM:
                report.error(
                    "E0310",
                    f"{name} cannot be {value}",
                    size.span or tree.span,
                    f"must be 1 to {MAX_HEAD_DIM}",
                )
                break


def check_prefix_fits(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports `v via prefix(k)` where no choice has Dv <= D."""
    if attention.v.storage.is_part and not attention.joins_values:
        widest = max(_values(attention.k.shape[-1], attention), default=MAX_HEAD_DIM)
        if widest < min(_values(attention.v.shape[-1], attention), default=1):
            place = attention.v.storage.span or tree.span
            related = () if attention.k.span is None else (Label(attention.k.span, f"{widest} columns"),)
            message = "v is wider than the k that it is a prefix of"
            hints = () if attention.k_rest is None else ("declare v of the type of q, for columns behind k",)
            report.error("E0316", message, place, "the first columns of k", related=related, hints=hints)


def check_sizes_are_known(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports run-time sizes that cannot be computed from the shapes of the tensors passed in."""
    axes = [axis for tensor in attention.inputs for axis in _memory_axes(tensor)]
    unknown = _unknown_dims(axes, known={"M", "N", *_bound_by_storage(attention)})
    for axis in axes:
        names = sorted(_dims(axis) & unknown)
        if names:
            hints = ("give K/V heads an axis of their own, 'Hkv'",) if "Hkv" in names else ()
            listed = " and ".join(f"'{name}'" for name in names)
            report.error(
                "E0321",
                f"no shape determines {listed}",
                axis.span or tree.span,
                "cannot be solved for it",
                hints=hints,
            )
            unknown -= set(names)


def check_paged_has_length(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports pages without a length: they do not say where a sequence ends."""
    storage = attention.k.storage
    if storage.is_paged and "N" not in attention.lengths:
        report.error(
            "E0318",
            "paged keys without a length",
            storage.span or tree.span,
            "the last page of a sequence is not full",
            hints=("declare 'input kv_len: i32[B]' and write 'length N = kv_len[b]'",),
        )


def check_lists_are_masks(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports lists outside of the mask, such as in a `where` of the score."""
    for expr in (attention.score, *attention.lengths.values(), *attention.softmax.expressions):
        for node in walk(expr):
            if isinstance(node, InList):
                hint = "write 'mask = listed(...)', with 'and' beside other conditions"
                label = "not part of the mask"
                report.error(
                    "E0334", "list outside of the mask", node.span or tree.span, label, hints=(hint,)
                )


def check_grads_are_float(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports gradients of what is no float."""
    for name in _grad_names(tree):
        choices = _dtypes(attention, attention.tensor(name.id))
        if not all(choice.is_float or choice.is_narrow for choice in choices):
            report.error(
                "E0319",
                f"'{name.id}' has no gradient",
                name.span,
                f"its elements are {choices[0]}, not floats",
            )


def check_grads_of_parts(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports the gradient of a v that is part of k, which has it."""
    if not attention.v.storage.is_part:
        return
    for name in _grad_names(tree):
        if name.id == attention.v.name:
            place = attention.v.storage.span
            report.error(
                "E0319",
                f"'{name.id}' has no gradient of its own",
                name.span,
                "its elements are columns of k",
                related=() if place is None else (Label(place, "its storage is declared here"),),
                hints=("write 'grad k': it sums what k gets as keys and as values",),
            )


def check_grads_of_narrow(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports gradients of k or v of 8 bits, or beside a scale of v, which no backward knows."""
    names = _grad_names(tree)
    if not names:
        return
    for tensor in (attention.k, attention.v):
        narrow = next((dtype for dtype in _dtypes(attention, tensor) if dtype.is_narrow), None)
        own = next((name for name in names if name.id == tensor.name), None)
        if narrow is not None and own is not None:
            related = (
                () if tensor.span is None else (Label(tensor.span, f"'{tensor.name}' is declared here"),)
            )
            report.error(
                "E0319",
                f"'{own.id}' has no gradient",
                own.span,
                f"its elements are {narrow}",
                related=related,
                hints=("train with keys and values of 16 bits, in an attention of its own",),
            )
            return
    if attention.k_rest is not None:
        report.error(
            "E0319",
            f"'{names[0].id}' has no gradient beside keys of two inputs",
            names[0].span,
            "no backward knows the columns behind those of k",
            hints=("join them before the call, where autograd sees it",),
        )
    elif attention.softmax.v_scale is not None or attention.k_scale is not None:
        of, what = ("v", "v, or o,") if attention.k_scale is None else ("columns of k", "k")
        report.error(
            "E0319",
            f"'{names[0].id}' has no gradient beside a scale of {of}",
            names[0].span,
            "no backward knows the factor",
            hints=(f"multiply {what} by it outside of the kernel, where autograd sees it",),
        )


def check_grads_are_used(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports gradients of what the result does not depend on differentiably, through the score or the
    sink.
    """
    used = {"q", "k", "v"}
    for expr in (attention.score, attention.softmax.sink, attention.epilogue):
        used |= {node.tensor for node in walk(expr) if isinstance(node, Load)} if expr else set()
    for name in _grad_names(tree):
        if name.id not in used and _dtypes(attention, attention.tensor(name.id))[0].is_float:
            label = "neither the score nor the sink reads it"
            label += "" if attention.epilogue is None else ", nor does the epilogue"
            report.error("E0319", f"the gradient of '{name.id}' is zero", name.span, label)


def check_unused(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports inputs, params and lets that nothing uses."""
    used: set[str] = set()
    places: dict[str, tuple[str, ast.Name]] = {}
    for item in tree.items:
        match item:
            case ast.Param(name=name):
                places[name.id] = ("param", name)
            case ast.Let(name=name, value=value):
                places[name.id] = ("let", name)
                used |= {mention.id for mention in list_names(value)}
            case ast.Input(names=names):
                places |= {name.id: ("input", name) for name in names if name.id not in ("q", "k", "v")}
                parts = (item.dtype, *item.shape, *((item.storage,) if item.storage else ()))
                used |= {mention.id for part in parts for mention in list_names(part)}
            case ast.Output(dtype=dtype, shape=shape, value=value):
                parts = (dtype, *shape, *((value,) if value else ()))
                used |= {mention.id for part in parts for mention in list_names(part)}
            case (
                ast.Score(value=value)
                | ast.Weight(value=value)
                | ast.Mask(value=value)
                | ast.Length(value=value)
                | ast.Normalize(value=value)
                | ast.Order(value=value)
            ):
                used |= {mention.id for mention in list_names(value)}
            case _:
                pass
    for what, name in places.values():
        if name.id not in used:
            report.warning("W0201", f"{what} '{name.id}' is never used", name.span, "may be removed")


def check_one_schedule_each(
    schedules: Sequence[Schedule], attentions: Mapping[str, Attention], report: Reporter
) -> None:
    """Reports schedules of one attention for one target that no labels tell apart."""
    known: dict[tuple[str, str], list[Schedule]] = {}
    for schedule in schedules:
        others = known.setdefault((schedule.name, schedule.target), [])
        labels = ("", schedule.label.lower())  # case alone does not tell files apart
        clash = next((other for other in others if other.label.lower() in labels), None)
        if clash is None and others and not schedule.label:
            clash = others[0]
        if clash is not None and schedule.span and clash.span:
            called = f" called '{schedule.label}'" if schedule.label and clash.label else ""
            example = f"schedule {schedule.name} for {schedule.target} as prefill"
            report.error(
                "E0408",
                f"second schedule of '{schedule.name}' for {schedule.target}{called}",
                schedule.span,
                "this one",
                related=(Label(clash.span, "the first"),),
                hints=(f"give each a label of its own: '{example}'",),
            )
        others.append(schedule)


def check_backward_has_grads(
    schedules: Sequence[Schedule], attentions: Mapping[str, Attention], report: Reporter
) -> None:
    """Reports a backward phase of an attention without gradients: it schedules nothing."""
    for schedule in schedules:
        attention = attentions.get(schedule.name)
        said = {*schedule.knobs, *schedule.listed, *schedule.whens}
        scheduled = said & {"backward", *PARTS["backward"]}
        if attention and not attention.grads and scheduled and schedule.span:
            report.warning(
                "W0801",
                f"'{attention.name}' has no gradients",
                schedule.span,
                "its backward phase is never used",
                hints=("write 'grad q, k, v' in the attention, or remove the phase",),
            )


def check_column_scales(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports scales of columns that differ among the query heads of a K/V head, and of values in the keys
    one that is not the keys', or any where they are keys as products have them.
    """
    scales = attention.column_scales
    for name, scale in scales.items():
        if attention.group != Const(1) and not is_shared(scale):
            report.error(
                "E0317" if name == "v" else "E0306",
                f"the scale of columns of {name} is one of query heads",
                scale.span or tree.span,
                "query heads that share a K/V head read the same numbers",
                hints=("write 'h // G'",),
            )
    if attention.joins_values and "v" in scales:
        report.error(
            "E0317",
            "values as products have them with a scale of columns",
            scales["v"].span or tree.span,
            "they are scaled as keys, and rounded",
            hints=("remove 'v_scale'",),
        )
    is_stored = attention.v.storage.is_part and not attention.joins_values
    if is_stored and scales and scales.get("k") != scales.get("v"):
        place = next(iter(scales.values())).span or tree.span
        report.error(
            "E0317",
            "values in the keys with a scale of columns that is not the keys'",
            place,
            "v is the first columns of k",
            hints=("give 'v_scale' and 'dot(q, k * ...)' the same scale",),
        )


def check_joined_keys(tree: ast.Attention, attention: Attention, report: Reporter) -> None:
    """Reports columns behind those of k that differ among the query heads of a K/V head, or have another type
    than q.
    """
    rest = attention.k_rest
    if rest is None:
        return
    place = rest.span or tree.span
    if attention.group != Const(1) and not is_shared(rest):
        report.error(
            "E0306",
            "the columns behind those of k are of query heads",
            place,
            "query heads that share a K/V head read the same numbers",
            hints=("write 'h // G'",),
        )
    tensor = attention.tensor(rest.tensor)
    if tensor.dtype != attention.q.dtype:
        declared = () if tensor.span is None else (Label(tensor.span, f"'{tensor.name}' is {tensor.dtype}"),)
        label = f"products are of {attention.q.dtype}, the type of q"
        message = f"q and {tensor.name} differ in element type"
        report.error("E0313", message, place, label, related=declared)


ATTENTION_RULES: tuple[AttentionRule, ...] = (
    check_head_dims,
    check_prefix_fits,
    check_sizes_are_known,
    check_paged_has_length,
    check_lists_are_masks,
    check_grads_are_float,
    check_grads_of_parts,
    check_grads_of_narrow,
    check_column_scales,
    check_joined_keys,
    check_grads_are_used,
    check_unused,
)
SCHEDULE_RULES: tuple[ScheduleRule, ...] = (check_one_schedule_each, check_backward_has_grads)


def _values(size: Expr, attention: Attention) -> list[int]:
    match size:
        case Const(value=int() as value):
            return [value]
        case Param(name=name):
            return [choice for choice in _choices(attention, name) if type(choice) is int]
        case _:
            return []


def _choices(attention: Attention, param: str) -> Sequence[DType | bool | int | float]:
    return next(p.choices for p in attention.params if p.name == param)


def _dtypes(attention: Attention, tensor: Tensor) -> tuple[DType, ...]:
    if isinstance(tensor.dtype, DType):
        return (tensor.dtype,)
    return tuple(DType(str(choice)) for choice in _choices(attention, tensor.dtype))


def _grad_names(tree: ast.Attention) -> list[ast.Name]:
    return [name for item in tree.items if isinstance(item, ast.Grad) for name in item.names]


def _dims(axis: Expr) -> set[str]:
    return {node.name for node in walk(axis) if isinstance(node, Dim)}


def _unknown_dims(axes: Sequence[Expr], known: set[str]) -> set[str]:
    """Returns the dims of the axes that cannot be solved for, each axis giving the value of its last unknown.

    Sums and products in which every dim occurs once can be solved, floor divisions and squares cannot.
    """
    unknown = [_dims(axis) - known for axis in axes]
    solvable = [_is_solvable(axis) for axis in axes]
    axes_of: dict[str, list[int]] = {}
    for i, names in enumerate(unknown):
        for name in names:
            axes_of.setdefault(name, []).append(i)
    ready = [i for i, names in enumerate(unknown) if len(names) == 1 and solvable[i]]
    while ready:
        names = unknown[ready.pop()]
        if len(names) == 1:
            [name] = names
            for i in axes_of[name]:
                unknown[i].discard(name)
                ready += [i] if len(unknown[i]) == 1 and solvable[i] else []
    return set().union(*unknown)


def _is_solvable(axis: Expr) -> bool:
    nodes = tuple(walk(axis))
    has_division = any(isinstance(node, Binary) and node.op == "//" for node in nodes)
    return not has_division and sum(isinstance(node, Dim) for node in nodes) == len(_dims(axis))


def _memory_axes(tensor: Tensor) -> tuple[Expr, ...]:
    return () if tensor.storage.is_part else tensor.shape


def _bound_by_storage(attention: Attention) -> set[str]:
    return {name for t in attention.inputs if t.storage.is_packed for name in _dims(t.shape[0])}
