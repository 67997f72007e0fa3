"""`order = absolute`, or `absolute(2048)`: in which order keys are summed.

Keys are cut into segments at multiples of a size that belongs to the attention. The sums of a segment start
from nothing, and segments are joined one after the other. So the bits of a row follow from its own keys, and
not from what else is in a call, from how the call is cut, or from which of the schedules serves it.
"""

from __future__ import annotations

from attnc.diagnostics import Reporter, did_you_mean
from attnc.expr.nodes import Const, Expr, Param
from attnc.model.attention import Softmax
from attnc.model.elaborate import Elaborator
from attnc.model.scope import Scope
from attnc.syntax import ast

#: Keys of a segment: whole tiles of products, which are 16 keys deep.
LEAST_SEGMENT, LARGEST_SEGMENT = 16, 1 << 20
#: Where a spec does not say it: measured on an H200, the smallest that costs prompts 6 % or less and decode
#: steps 10 %, of heads of 64 and 128 columns and of as many sequences as keep the GPU busy.
USUAL_SEGMENT = 2048
_EXAMPLE = "write 'order = absolute(2048)'"


def resolve_order(
    tree: ast.Order | None, softmax: Softmax | None, elaborator: Elaborator, scope: Scope, report: Reporter
) -> Expr | None:
    """Returns the keys of a segment, a number or a param; None where the spec leaves the order open, and
    after reporting what is wrong.
    """
    if tree is None:
        return None
    call, name = (tree.value, tree.value.function) if isinstance(tree.value, ast.Call) else (None, tree.value)
    if name.id != "absolute":
        hints = (*did_you_mean(name.id, ("absolute",)), *_belongs_to_schedules(name.id))
        report.error(
            "E0335",
            f"unknown order '{name.id}'",
            name.span,
            "must be 'absolute', or 'absolute(keys)'",
            hints=hints,
        )
        return None
    if call is not None and (len(call.args) != 1 or call.kwargs):
        label = "takes one number: the keys of a segment"
        report.error(
            "E0335", "an order without the size of its segments", call.span, label, hints=(_EXAMPLE,)
        )
        return None
    if softmax is not None and softmax.form != "softmax":
        message = f"an order beside 'normalize = {softmax.form}'"
        report.error("E0335", message, tree.span, "only sums of a softmax have one", hints=("remove it",))
        return None
    return Const(USUAL_SEGMENT) if call is None else _segment(call.args[0], elaborator, scope, report)


def _segment(tree: ast.Expr, elaborator: Elaborator, scope: Scope, report: Reporter) -> Expr | None:
    size = elaborator.elaborate_typed(tree, "int", "the size of a segment")
    if size is None:
        return None
    found: tuple[object, ...]
    match size:
        case Const(value=value):
            found = (value,)
        case Param(name=name):
            found = tuple(getattr(scope.params.get(name), "choices", ()))
        case _:
            label = "must be a number or a param: it belongs to the attention, not to a call"
            report.error("E0335", "the size of a segment varies", tree.span, label)
            return None
    for keys in found:
        if not _is_size(keys):
            label = f"must be a multiple of {LEAST_SEGMENT}, at most {LARGEST_SEGMENT:,}"
            report.error("E0335", f"segments of {keys} keys", tree.span, label, hints=(_EXAMPLE,))
            return None
    return size


def _is_size(value: object) -> bool:
    return isinstance(value, int) and LEAST_SEGMENT <= value <= LARGEST_SEGMENT and not value % LEAST_SEGMENT


def _belongs_to_schedules(word: str) -> tuple[str, ...]:
    return ("the order of tiles is a key of schedules",) if word in ("default", "longest_first") else ()
