"""Says what is wrong with a name that stands where it cannot."""

from __future__ import annotations

from collections.abc import Mapping

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
