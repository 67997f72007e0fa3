"""`param`s: their choices as values, and the dimensions that they fix."""

from __future__ import annotations

from attnc.expr.nodes import Const, Dim, Expr
from attnc.expr.nodes import Param as ParamNode
from attnc.model.attention import Param
from attnc.model.names import DIMS, PARAM_DIMS
from attnc.model.report import Report
from attnc.model.scope import WRONG, Wrong
from attnc.model.tensors import DType
from attnc.syntax import ast

DEFAULT_HEAD_DIMS = (64, 128)
MAX_HEAD_DIM = 1024


def resolve_param(tree: ast.Param, report: Report) -> Param | Wrong:
    """The param with its choices, which are all element types, all numbers, or all true or false."""
    name, before = tree.name.id, report.errors
    choices: dict[tuple[str, DType | bool | int | float], DType | bool | int | float] = {}
    for choice in tree.choices:
        value = _choice(choice)
        if value is None:
            label = "a number, an element type, true or false"
            report.error("E0307", "not a choice of a param", choice.span, f"must be {label}")
        elif (_kind(value), value) in choices:
            report.error("E0307", f"'{choice.span.text}' is listed twice", choice.span, "second time")
        else:
            choices[_kind(value), value] = value
    values = tuple(choices.values())
    if len({kind for kind, _ in choices}) > 1:
        report.error("E0307", f"choices of param '{name}' are of different kinds", tree.span, "mixed")
    elif len({value.is_float for value in values if isinstance(value, DType)}) > 1:
        report.error("E0307", f"choices of param '{name}' mix floats and integers", tree.span, "mixed")
    elif name in DIMS and not all(type(value) is int and value > 0 for value in values):
        report.error("E0307", f"'{name}' is a size", tree.span, "its choices must be positive integers")
    return WRONG if report.errors > before else Param(name=name, choices=values, span=tree.span)


def _choice(tree: ast.Expr) -> DType | bool | int | float | None:
    match tree:
        case ast.Bool(value=value):
            return value
        case ast.Number(value=value) if abs(value) < 2**63:
            return value
        case ast.UnaryOp(operand=ast.Number(value=value)) if abs(value) < 2**63:
            return -value
        case ast.Name(id=name) if name in list(DType):
            return DType(name)
        case _:
            return None


def _kind(value: DType | bool | int | float) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def raw_dims(attention: ast.Attention, params: dict[str, Param | Wrong]) -> dict[str, Expr]:
    """What the reserved dimensions stand for in the shapes of q, k and v.

    D is the last axis of q and Dv that of v, whatever is written there; those that the spec leaves open
    become params with `is_default`, added to `params`. The others are params if declared so, else run-time
    sizes.
    """
    shapes = {
        name.id: item.shape for item in attention.items if isinstance(item, ast.Input) for name in item.names
    }
    dims: dict[str, Expr] = {}
    for name in DIMS:
        if name not in params and name not in ("D", "Dv"):
            dims[name] = Dim(name)
        elif isinstance(params.get(name), Param) and name in PARAM_DIMS:
            dims[name] = ParamNode(name, "int")
    for name, tensor in (("D", "q"), ("Dv", "v")):
        last = shapes[tensor][-1] if shapes.get(tensor) else None
        if name in params:
            continue
        fixed = _stated_size(last, dims, params)
        if fixed is None and (name == "D" or (isinstance(last, ast.Name) and last.id == "Dv")):
            params[name] = Param(name=name, choices=DEFAULT_HEAD_DIMS, is_default=True)
            fixed = ParamNode(name, "int")
        dims[name] = fixed or dims.get("D", Dim("D"))
    return dims


def _stated_size(
    tree: ast.Expr | None, dims: dict[str, Expr], params: dict[str, Param | Wrong]
) -> Expr | None:
    """Returns the head dimension that a last axis states: a number, or a name with a known meaning."""
    match tree:
        case ast.Number(value=int() as value):
            return Const(value)
        case ast.Name(id=name) if isinstance(params.get(name), Param):
            return ParamNode(name, "int")
        case ast.Name(id="D") if "D" in dims:
            return dims["D"]
        case _:
            return None
