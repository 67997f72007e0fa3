"""Says what is wrong with a name that stands where it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnc.diagnostics import Label, did_you_mean
from attnc.model.names import CALLABLE, OUTPUTS, RESERVED
from attnc.model.scope import Context
from attnc.model.tensors import Tensor
from attnc.syntax import ast

#: Values that Python and FlexAttention have, and what to write here.
_ELSEWHERE: Mapping[str, str] = {
    "True": "write 'true'",
    "False": "write 'false'",
    "None": "leave it out",
    **dict.fromkeys(("INF", "Inf", "infinity"), "write 'inf'"),
}
#: Functions of theirs, likewise.
_FUNCTIONS: Mapping[str, str] = {
    "pow": "write x * x for a square, exp2(y * log2(x)) for x to the power of y",
    "relu": "write max(x, 0)",
    "rsqrt": "write 1 / sqrt(x)",
    "log1p": "write log(1 + x)",
    "expm1": "write exp(x) - 1",
    "log10": "write log(x) / log(10)",
    **dict.fromkeys(("maximum", "fmax"), "write 'max'"),
    **dict.fromkeys(("minimum", "fmin"), "write 'min'"),
    **dict.fromkeys(("fabs", "absolute"), "write 'abs'"),
    **dict.fromkeys(("clip", "clamp_"), "write clamp(x, lo, hi)"),
    **dict.fromkeys(("silu", "swish"), "write x * sigmoid(x)"),
    **dict.fromkeys(
        ("floor", "ceil", "round", "trunc", "int"),
        "no float becomes an integer: divide integers with '//', or compare with each threshold",
    ),
    "float": "an integer becomes a float where one is needed",
    "len": "lengths are sizes, such as N, and inputs, such as kv_len[b]",
    **dict.fromkeys(("sum", "mean", "cumsum"), "a score is of one query and one key: pass sums as an input"),
    **dict.fromkeys(("logical_and", "logical_or"), "write 'and' and 'or' between conditions"),
    **dict.fromkeys(("rand", "random", "dropout"), "write softmax(dropout = p, seed = seed)"),
    **dict.fromkeys(("sin", "cos"), "pass a table of its values as an input"),
}
#: Element types of theirs.
_TYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "f16": "half float16 fp16",
    "f32": "float float32 fp32 single",
    "i32": "int int32 s32 u32",
    "i64": "long int64 s64",
    "bool": "bool_ boolean i1 b1",
}
_TYPE_OF = {theirs: ours for ours, names in _TYPES.items() for theirs in names.split()}


def called_here(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The hint about a function of this name that there is not: what is written for it, or what is close."""
    return (_FUNCTIONS[name],) if name in _FUNCTIONS else did_you_mean(name, known)


def type_here(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The same of an element type."""
    return (f"write '{_TYPE_OF[name]}'",) if name in _TYPE_OF else did_you_mean(name, known)


def report_misuse(tree: ast.Name, at: Context, *, subscripted: bool = False) -> None:
    """Report a name that is not a value (or, if `subscripted`, not a tensor) here; the last resort is
    "unknown name".
    """
    name, span, scope = tree.id, tree.span, at.scope
    meaning = at.meaning(name)
    if name in ("q", "k", "v"):
        at.error(
            "E0207", f"'{name}' is not a value", span, "a whole tensor", hints=("a score uses 'dot(q, k)'",)
        )
    elif isinstance(meaning, Tensor):
        axes = ", ".join(["..."] * len(meaning.shape))
        at.error(
            "E0207",
            f"'{name}' is a tensor, not a value",
            span,
            "needs a subscript",
            hints=(f"write '{name}[{axes}]', an index for each axis",) if axes else (),
        )
    elif meaning is not None and subscripted:
        at.error("E0207", f"'{name}' cannot be subscripted", span, "not an input")
    elif name in scope.let_places and at.site is None:
        at.error(
            "E0208",
            f"'{name}' is used before it is defined",
            span,
            "not known yet",
            related=(Label(scope.let_places[name].span, "defined here"),),
            hints=("lets are read from top to bottom: move the definition up",),
        )
    elif name in OUTPUTS:
        at.error("E0207", f"'{name}' is an output", span, "cannot be read")
    elif meaning is not None or name in RESERVED or name in CALLABLE:
        kind = "an intrinsic function" if name in CALLABLE else "an element type"
        label, hint = RESERVED.get(name, kind), _ELSEWHERE.get(name)
        at.error("E0207", f"'{name}' is not a value", span, label, hints=(hint,) if hint else ())
    else:
        known = (*scope.names(), *CALLABLE)
        at.error(
            "E0203",
            f"unknown name '{name}'",
            span,
            "not an index, dimension, input, param, let or def",
            hints=(_ELSEWHERE[name],) if name in _ELSEWHERE else did_you_mean(name, known),
        )
