"""`normalize = softmax(...)` and its arguments, and the forms without any."""

from __future__ import annotations

from collections.abc import Mapping

from attnc.diagnostics import Reporter, did_you_mean
from attnc.expr.nodes import Const, Dot, Expr, Load, Type, uses, walk
from attnc.model.attention import Form, Softmax
from attnc.model.columns import COLUMN_HINT, COLUMN_LABEL, COLUMNS, find_column_mistake, reads_columns
from attnc.model.dtypes import DType
from attnc.model.elaborate import Elaborator
from attnc.model.scope import Scope
from attnc.model.tensors import Tensor
from attnc.syntax import ast

#: Forms that take no arguments.
_BARE: Mapping[str, Form] = {"softpick": "softpick", "stick_breaking": "stick_breaking", "none": "none"}
ARGUMENTS = ("sink", "dropout", "seed", "first_head", "v_scale")
#: What other libraries say to their softmax, and where it belongs here.
_ELSEWHERE = {
    **dict.fromkeys(("scale", "temperature", "sm_scale"), "multiply the score: score = dot(q, k) * scale"),
    **dict.fromkeys(("v_descale", "descale_v", "value_scale"), "write softmax(v_scale = ...)"),
    **dict.fromkeys(("k_scale", "k_descale"), "multiply the score: score = dot(q, k) * k_scale"),
    **dict.fromkeys(("mask", "causal", "is_causal"), "write 'mask = ...', a statement of its own"),
    **dict.fromkeys(("bias", "softcap"), "it is a part of the score"),
    **dict.fromkeys(("p", "dropout_p", "rate"), "write softmax(dropout = p, seed = seed)"),
}
_SORTS = "a threshold for each row takes a sort of its scores, which is outside of the language"
_WEIGHTS = "write 'normalize = none' and 'weight = {}'"
#: Other normalizations, and what is written for them.
_OTHERS = {
    **dict.fromkeys(("sigmoid", "logistic"), _WEIGHTS.format("sigmoid(score)")),
    **dict.fromkeys(("silu", "swish", "hstu"), _WEIGHTS.format("score * sigmoid(score)")),
    "relu": _WEIGHTS.format("max(score, 0)"),
    **dict.fromkeys(
        ("relu_squared", "relu2", "squared_relu"), _WEIGHTS.format("max(score, 0) * max(score, 0)")
    ),
    "exp": _WEIGHTS.format("exp(score)"),
    **dict.fromkeys(("linear", "identity", "sum", "false"), "write 'normalize = none'"),
    **dict.fromkeys(("stick", "stickbreaking", "stick_breaking_attention"), "write 'stick_breaking'"),
    **dict.fromkeys(("rectified_softmax", "soft_pick"), "write 'softpick'"),
    **dict.fromkeys(("sparsemax", "entmax", "topk", "hardmax"), _SORTS),
    **dict.fromkeys(
        ("delta", "gated_delta", "deltanet", "retention", "gla", "mamba", "ssm", "rwkv", "linear_recurrence"),
        "a recurrence over a state is outside of the language; sums without one are 'normalize = none'",
    ),
    **dict.fromkeys(("softmax1", "softmax_one", "off_by_one"), "write 'softmax(sink = 0)'"),
    **dict.fromkeys(
        ("dropout", "sink"), "write 'softmax(dropout = p, seed = seed)' or 'softmax(sink = sink[h])'"
    ),
}


def resolve_softmax(
    tree: ast.Normalize, elaborator: Elaborator, scope: Scope, report: Reporter
) -> Softmax | None:
    """Returns the softmax, or another form, or None after reporting what is wrong."""
    before = report.errors
    name = tree.value.function if isinstance(tree.value, ast.Call) else tree.value
    if name.id in _BARE:
        if isinstance(tree.value, ast.Call):
            label = "nothing is normalised" if name.id == "none" else "softmax alone has some"
            report.error("E0213", f"'{name.id}' takes no arguments", tree.value.span, label)
            return None
        return Softmax(form=_BARE[name.id], span=tree.span)
    if name.id != "softmax":
        names = ("softmax", *_BARE)
        hints = (_OTHERS[name.id],) if name.id in _OTHERS else did_you_mean(name.id, names)
        label = f"must be {', '.join(map(repr, names[:-1]))} or '{names[-1]}'"
        report.error("E0213", f"unknown normalization '{name.id}'", name.span, label, hints=hints)
        return None
    arguments = _arguments(tree.value, report) if isinstance(tree.value, ast.Call) else {}
    sink = _sink(arguments["sink"], elaborator, scope, report) if "sink" in arguments else None
    dropout = _dropout(arguments["dropout"], elaborator, report) if "dropout" in arguments else None
    seed = _seed(arguments["seed"], elaborator, scope, report) if "seed" in arguments else None
    first_head = None
    if "first_head" in arguments:
        first_head = _first_head(arguments["first_head"], elaborator, report)
        if "dropout" not in arguments:
            report.error(
                "E0317",
                "softmax has 'first_head' without 'dropout'",
                arguments["first_head"].span,
                "says which heads dropout is drawn for",
                hints=("remove it",),
            )
    if ("dropout" in arguments) != ("seed" in arguments):
        given, missing = ("dropout", "seed") if "dropout" in arguments else ("seed", "dropout")
        report.error(
            "E0317",
            f"softmax has '{given}' without '{missing}'",
            arguments[given].span,
            "dropout is a function of a probability and a seed",
            hints=(
                "declare 'input p: f32[]' and 'input seed: i64[]', write 'softmax(dropout = p, seed = seed)'",
            ),
        )
    v_scale = _v_scale(arguments["v_scale"], elaborator, report) if "v_scale" in arguments else None
    if report.errors > before:
        return None
    return Softmax(
        sink=sink, dropout=dropout, seed=seed, first_head=first_head, v_scale=v_scale, span=tree.span
    )


def _arguments(call: ast.Call, report: Reporter) -> dict[str, ast.Expr]:
    arguments: dict[str, ast.Expr] = {}
    for arg in call.args:
        report.error(
            "E0213", "softmax takes named arguments only", arg.span, f"one of {', '.join(ARGUMENTS)}"
        )
    for keyword in call.kwargs:
        name = keyword.name
        if name.id not in ARGUMENTS:
            report.error(
                "E0213",
                f"softmax has no argument '{name.id}'",
                name.span,
                f"its arguments are {', '.join(ARGUMENTS)}",
                hints=(_ELSEWHERE[name.id],) if name.id in _ELSEWHERE else did_you_mean(name.id, ARGUMENTS),
            )
        elif name.id in arguments:
            report.error("E0213", f"'{name.id}' is given twice", name.span, "second time")
        else:
            arguments[name.id] = keyword.value
    return arguments


def _sink(tree: ast.Expr, elaborator: Elaborator, scope: Scope, report: Reporter) -> Expr | None:
    sink = elaborator.elaborate_typed(tree, "float", "the sink")
    if sink is None:
        return None
    if uses(sink) - {"h"} or any(isinstance(node, Dot) for node in walk(sink)):
        report.error("E0317", "the sink is not one number for each head", tree.span, "may depend on h only")
        return None
    for node in walk(sink):
        tensor = scope.tensors.get(node.tensor) if isinstance(node, Load) else None
        if isinstance(tensor, Tensor) and isinstance(tensor.dtype, DType) and not tensor.dtype.is_float:
            report.error(
                "E0317",
                f"the sink '{tensor.name}' is not of a float type",
                tree.span,
                f"its type is {tensor.dtype}",
            )
            return None
    return Const(float(sink.value), span=sink.span) if isinstance(sink, Const) else sink


def _v_scale(tree: ast.Expr, elaborator: Elaborator, report: Reporter) -> Expr | None:
    scale = elaborator.elaborate_typed(tree, "float", "the scale of v", COLUMNS)
    if scale is None:
        return None
    if any(isinstance(node, Dot) for node in walk(scale)):
        report.error(
            "E0317", "the scale of v reads the score", tree.span, "may depend on b, h, the query and the key"
        )
        return None
    if reads_columns(scale) and (mistake := find_column_mistake(scale, "v")):
        report.error("E0317", mistake, tree.span, COLUMN_LABEL, hints=(COLUMN_HINT,))
        return None
    return Const(float(scale.value), span=scale.span) if isinstance(scale, Const) else scale


def _dropout(tree: ast.Expr, elaborator: Elaborator, report: Reporter) -> Expr | None:
    p = _one_number(tree, "float", "f32", "the dropout probability", elaborator, report)
    if not isinstance(p, Const):
        return p
    if not 0 <= p.value < 1:
        report.error("E0317", "not a dropout probability", tree.span, "must be at least 0 and below 1")
        return None
    return Const(float(p.value), span=p.span)


def _seed(tree: ast.Expr, elaborator: Elaborator, scope: Scope, report: Reporter) -> Expr | None:
    seed = elaborator.elaborate_typed(tree, "int", "the dropout seed")
    tensor = scope.tensors.get(seed.tensor) if isinstance(seed, Load) else None
    if isinstance(tensor, Tensor) and tensor.dtype is DType.I64 and not tensor.shape:
        return seed
    if seed is not None:
        report.error("E0317", "the dropout seed is not a scalar input", tree.span, "must be an input 'i64[]'")
    return None


def _first_head(tree: ast.Expr, elaborator: Elaborator, report: Reporter) -> Expr | None:
    """Resolves how many heads of the whole come before those of a call: one number for the launch."""
    return _one_number(tree, "int", "i32", "the first head", elaborator, report)


def _one_number(
    tree: ast.Expr, kind: Type, dtype: str, what: str, elaborator: Elaborator, report: Reporter
) -> Expr | None:
    """Resolves a number of the whole launch, or reports that it varies. dtype: of an input that would do."""
    number = elaborator.elaborate_typed(tree, kind, what)
    if number is not None and (uses(number) or any(isinstance(node, Dot) for node in walk(number))):
        label = f"must be one number: a scalar input '{dtype}[]'"
        report.error("E0317", f"{what} varies", tree.span, label)
        return None
    return number
