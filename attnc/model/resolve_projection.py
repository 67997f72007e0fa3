"""ast.Projection -> model.Projection: names, shapes and the equation, with every error said at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.expr.nodes import Const, Dim, Expr
from attnc.expr.nodes import Param as ParamNode
from attnc.model.attention import Param
from attnc.model.declarations import resolve_param
from attnc.model.dtypes import DType
from attnc.model.names import OF_FUNCTIONS, PYTHON, Taken, type_here
from attnc.model.program import SHAPES, Projection
from attnc.model.tensors import Tensor
from attnc.source import Span
from attnc.syntax import ast

SIZES = ("M", "N", "K")
EQUATION = "y = dot(x, w)"
_RESERVED: Mapping[str, str] = {
    **dict.fromkeys(SHAPES, "a tensor of the projection"),
    **dict.fromkeys((dtype for dtype in DType if dtype.facts.is_reserved), "an element type"),
    **dict.fromkeys(("M", "m", "n", "k", "dot"), "a word of projections"),
    **OF_FUNCTIONS,
    **PYTHON,
}


def resolve_projection(tree: ast.Projection, report: Reporter) -> Projection | None:
    """Returns the projection, or None after reporting what is wrong with it."""
    return _ProjectionResolver(tree, report).projection()


@dataclass(slots=True)
class _ProjectionResolver:
    tree: ast.Projection
    report: Reporter
    params: dict[str, Param] = field(default_factory=dict)
    sizes: dict[str, Expr] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def projection(self) -> Projection | None:
        before = self.report.errors
        self._params()
        for item in self.tree.items:
            match item:
                case ast.Input(names=names):
                    for name in names:
                        self._tensor(name, item, output=False)
                    self._no_adjectives(item)
                case ast.Output(name=name, value=value):
                    if value is not None:
                        self.report.error(
                            "E0331",
                            "the equation of a projection is a statement of its own",
                            value.span,
                            "behind the declaration of y",
                            hints=("write it on a line of its own: 'y = dot(x, w)'",),
                        )
                    self._tensor(name, item, output=True)
                case _:
                    pass
        self._check_equation()
        for missing, shape in (("x", "T[M, K]"), ("w", "T[N, K]"), ("y", "T[M, N]")):
            if missing not in self.tensors and self.report.errors == before:
                word = "output" if missing == "y" else "input"
                self._incomplete(f"{word} '{missing}'", f"add '{word} {missing}: {shape}'")
        if self.report.errors > before:
            return None
        self._check_unused()
        return Projection(
            name=self.tree.name.id,
            params=tuple(self.params.values()),
            tensors=self.tensors,
            sizes=self.sizes,
            span=self.tree.span,
        )

    def _params(self) -> None:
        taken = Taken(self.report)
        for item in self.tree.items:
            if isinstance(item, ast.Param) and taken.declare(item.name, reserved=_RESERVED):
                param = resolve_param(item, self.report)
                if isinstance(param, Param):
                    self.params[param.name] = param

    def _tensor(self, name: ast.Name, tree: ast.Input | ast.Output, *, output: bool) -> None:
        known = ("y",) if output else ("x", "w", "bias")
        if name.id not in known:
            word = "output y" if output else "inputs x, w and, if it adds one, bias"
            hints = did_you_mean(name.id, known)
            self._shape_error(f"'{name.id}' is no tensor of a projection", name.span, f"it has {word}", hints)
            return
        first = self.tensors.get(name.id)
        if first is not None and first.span is not None:
            related = (Label(first.span, "first definition"),)
            message = f"'{name.id}' is defined twice"
            self.report.error("E0201", message, name.span, "second definition", related=related)
            return
        dtype = self._dtype(tree.dtype)
        shape = tuple(map(self._size, tree.shape))
        wanted = SHAPES[name.id]
        if len(shape) != len(wanted):
            self._shape_error(f"'{name.id}' has {len(shape)} axes", tree.span, f"it is [{', '.join(wanted)}]")
            return
        for size, axis, place in zip(shape, wanted, tree.shape, strict=True):
            if size is not None:
                self._bind(axis, size, place.span)
        if dtype is not None and None not in shape:
            sizes = tuple(size for size in shape if size is not None)
            self.tensors[name.id] = Tensor(name=name.id, dtype=dtype, shape=sizes, span=tree.span)
        other = self.tensors.get("x")
        if dtype is not None and other is not None and other.dtype != dtype and other.span is not None:
            related = (Label(other.span, "x is declared here"),)
            message = f"x and {name.id} differ in element type"
            self._shape_error(message, tree.dtype.span, f"x is {other.dtype}", related=related)

    def _dtype(self, tree: ast.Name) -> DType | str | None:
        param = self.params.get(tree.id)
        choices = param.choices if param else (tree.id,)
        types = [DType(str(choice)) for choice in choices if choice in list(DType)]
        if types and all(dtype.is_float for dtype in types):
            return tree.id if param else types[0]
        self.report.error(
            "E0211",
            f"'{tree.id}' is not an element type of a projection",
            tree.span,
            "f16, bf16, f32 or a param over these",
            hints=type_here(tree.id, (DType.F16, DType.BF16, DType.F32, *self.params)),
        )
        return None

    def _size(self, tree: ast.Expr) -> Expr | None:
        match tree:
            case ast.Number(value=int() as value) if 1 <= value < 2**31:
                return Const(value)
            case ast.Name(id=name) if name in self.params:
                if all(type(choice) is int and choice > 0 for choice in self.params[name].choices):
                    return ParamNode(name, "int")
            case ast.Name(id=name) if name in SIZES:
                return Dim(name)
        label = "M, N, K, a positive integer or a param over such"
        self.report.error("E0308", "not a size of a projection", tree.span, label)
        return None

    def _bind(self, axis: str, size: Expr, place: Span) -> None:
        first = self.sizes.setdefault(axis, size)
        if first != size or (isinstance(size, Dim) and size.name != axis):
            names = " and ".join(name for name, axes in SHAPES.items() if axis in axes and name != "bias")
            self._shape_error(f"this axis is not {axis}", place, f"{names} have {axis} in common")
        elif axis == "M" and not isinstance(size, Dim):
            self._shape_error("M is known when the function is called", place, "write 'M'")

    def _no_adjectives(self, tree: ast.Input) -> None:
        if tree.storage is not None or tree.facts:
            place = tree.storage.span if tree.storage is not None else tree.facts[0].span
            self._shape_error("storage and facts belong to attentions", place, "an ordinary tensor is meant")

    def _check_equation(self) -> None:
        found = [item for item in self.tree.items if isinstance(item, ast.Equation)]
        if not found:
            self._incomplete("an equation", f"add '{EQUATION}'")
            return
        for again in found[1:]:
            related = (Label(found[0].span, "first time"),)
            self.report.error("E0302", "the equation is given twice", again.span, "second", related=related)
        has_bias = any(
            name.id == "bias" for i in self.tree.items if isinstance(i, ast.Input) for name in i.names
        )
        wanted = f"{EQUATION} + bias[n]" if has_bias else EQUATION
        if not _is_equation(found[0], has_bias):
            self.report.error(
                "E0331",
                "not the equation of a projection",
                found[0].span,
                f"must be '{wanted}'",
                notes=("what is done to y beyond that is for the caller, or for the next kernel",),
            )

    def _check_unused(self) -> None:
        used = {str(tensor.dtype) for tensor in self.tensors.values()}
        used |= {size.name for size in self.sizes.values() if isinstance(size, ParamNode)}
        for name, param in self.params.items():
            if name not in used and param.span is not None:
                message = f"param '{name}' is never used"
                self.report.warning("W0201", message, param.span, "may be removed")

    def _incomplete(self, what: str, hint: str) -> None:
        name = self.tree.name
        message = f"projection without {what}"
        self.report.error("E0330", message, name.span, "x, w, y and their equation", hints=(hint,))

    def _shape_error(
        self,
        message: str,
        place: Span,
        label: str,
        hints: Sequence[str] = (),
        related: tuple[Label, ...] = (),
    ) -> None:
        self.report.error("E0332", message, place, label, hints=hints, related=related)


def _is_equation(tree: ast.Equation, has_bias: bool) -> bool:
    if tree.name.id != "y":
        return False
    match tree.value, has_bias:
        case (ast.BinaryOp(op="+", left=left, right=right), True):
            return any(_is_dot(a) and _is_bias(b) for a, b in ((left, right), (right, left)))
        case (value, False):
            return _is_dot(value)
        case _:
            return False


def _is_dot(tree: ast.Expr) -> bool:
    match tree:
        case ast.Call(function=ast.Name(id="dot"), args=(ast.Name(id="x"), ast.Name(id="w")), kwargs=()):
            return True
        case _:
            return False


def _is_bias(tree: ast.Expr) -> bool:
    match tree:
        case ast.Subscript(tensor=ast.Name(id="bias"), indices=(ast.Name(id="n"),)):
            return True
        case _:
            return False
