"""What names mean: in an attention, and in the bodies of the defs that it calls.

A body of a def sees its parameters, the indices, the dimensions, the intrinsics and other defs, but no
name of the attention that calls it: whatever else it needs is an argument. So each body is checked once,
here, and a mistake in it is reported once, however many calls there are; a definition with a mistake is
`broken`, and its calls are silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, TypeAlias

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.expr.nodes import INDICES, INFINITY, Expr, Index, Type
from attnc.model.attention import Param
from attnc.model.columns import Keys
from attnc.model.dtypes import DType
from attnc.model.names import CALLABLE, CAT, DIMS, LISTED, Taken
from attnc.model.tensors import Tensor
from attnc.source import Span
from attnc.syntax import ast


@dataclass(slots=True, eq=False)
class Definition:
    """A def and what its body may call. `broken` once a mistake in it has been reported."""

    tree: ast.Def
    visible: Mapping[str, Definition]
    broken: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.tree.name.id

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name.id for name in self.tree.params)

    def callees(self) -> list[Definition]:
        """Returns the definitions that the body mentions, each once, in order of first mention."""
        seen = {
            id(callee): callee
            for name in list_names(self.tree.value)
            if name.id not in self.params and (callee := self.visible.get(name.id)) is not None
        }
        return list(seen.values())


def collect(prelude: ast.File, file: ast.File, report: Reporter) -> Mapping[str, Definition]:
    """Returns the definition of every def that the file can use: its own, and those of the prelude that it
    does not redefine.
    """
    shipped: dict[str, Definition] = {}
    for tree in prelude.items:
        if isinstance(tree, ast.Def):
            shipped[tree.name.id] = Definition(tree, shipped)
    visible = dict(shipped)
    own: list[Definition] = []
    taken = Taken(report)
    for tree in file.items:
        if isinstance(tree, ast.Def):
            fresh = taken.declare(tree.name)
            own.append(Definition(tree, visible, broken=not fresh))
            if fresh or tree.name.id not in visible:
                visible[tree.name.id] = own[-1]
    for definition in (*shipped.values(), *own):
        _check_names(definition, report)
    _check_recursion((*shipped.values(), *own), report)
    return visible


def _check_names(definition: Definition, report: Reporter) -> None:
    before = report.errors
    taken = Taken(report)
    for name in definition.tree.params:
        taken.declare(name)
    values = (*definition.params, *INDICES, *DIMS, "inf")
    functions = (*CALLABLE, "dot", LISTED, *definition.visible)
    for name in list_names(definition.tree.value):
        if name.id not in values and name.id not in functions and name.id not in ("q", "k"):
            report.error(
                "E0203",
                f"unknown name '{name.id}'",
                name.span,
                "not a parameter, index, dimension or def",
                notes=("a def does not see the inputs, params and lets of the attentions that use it",),
                hints=did_you_mean(name.id, (*values, *functions)),
            )
    definition.broken |= report.errors > before


def _check_recursion(definitions: Sequence[Definition], report: Reporter) -> None:
    """Reports every cycle once and breaks its members; depth first, with a stack of its own against long
    chains.
    """
    done: set[Definition] = set()
    for root in definitions:
        path = {} if root in done else {root: iter(root.callees())}
        while path:
            last = next(reversed(path))
            callee = next(path[last], None)
            if callee is None:
                path.popitem()
                done.add(last)
            elif callee in path and not callee.broken:
                members = list(path)
                _report_cycle(members[members.index(callee) :], report)
            elif callee not in path and callee not in done:
                path[callee] = iter(callee.callees())


def _report_cycle(cycle: Sequence[Definition], report: Reporter) -> None:
    first, *rest = cycle
    report.error(
        "E0205",
        f"def '{first.name}' calls itself" + (" through others" if rest else ""),
        first.tree.name.span,
        "expanding it would never end",
        related=tuple(Label(d.tree.name.span, "by way of this def") for d in rest),
    )
    for definition in cycle:
        definition.broken = True


def list_names(tree: ast.Expr) -> Iterator[ast.Name]:
    """Yields every name in an expression, of values and of functions, in source order."""
    match tree:
        case ast.Name():
            yield tree
        case ast.UnaryOp(operand=operand) | ast.Not(operand=operand):
            yield from list_names(operand)
        case ast.BinaryOp(left=left, right=right):
            yield from list_names(left)
            yield from list_names(right)
        case ast.Compare(operands=parts) | ast.BoolOp(operands=parts) | ast.ListValue(items=parts):
            for part in parts:
                yield from list_names(part)
        case ast.Call(function=function, args=args, kwargs=kwargs):
            yield function
            for part in (*args, *(keyword.value for keyword in kwargs)):
                yield from list_names(part)
        case ast.Subscript(tensor=tensor, indices=indices):
            yield tensor
            for part in indices:
                yield from list_names(part)
        case _:
            pass


def joins_keys(tree: ast.Attention, scope: Scope) -> bool:
    """Returns whether a product may have keys of two inputs, `dot(q, cat(k, ...))`, so that k alone has fewer
    columns than q.
    """
    values = [item.value for item in tree.items if isinstance(item, ast.Score | ast.Weight | ast.Let)]
    values += [definition.tree.value for definition in scope.defs.values()]
    return any(name.id == CAT for value in values for name in list_names(value))


class Wrong(Enum):
    """Marks a name that is declared, but with a mistake that has been reported: whatever uses it stays
    silent.
    """

    WRONG = "wrong"


WRONG: Literal[Wrong.WRONG] = Wrong.WRONG

#: What a parameter of a def may stand for.
Argument: TypeAlias = Expr | Tensor | Wrong
Meaning: TypeAlias = Expr | Tensor | Param | Definition | Wrong


@dataclass(slots=True, kw_only=True)
class Scope:
    """The names of one attention, filled in the order of the fields."""

    defs: Mapping[str, Definition]
    params: dict[str, Param | Wrong] = field(default_factory=dict)
    dims: dict[str, Expr] = field(default_factory=dict)
    tensors: dict[str, Tensor | Wrong] = field(default_factory=dict)
    lets: dict[str, Expr | Wrong] = field(default_factory=dict)
    #: Names that could not be declared: used for another thing already, or reserved.
    refused: set[str] = field(default_factory=set)
    #: Where every let is, reached or not: to tell "defined below" from "unknown".
    let_places: dict[str, ast.Name] = field(default_factory=dict)
    #: Of every dot(q, ...), what q is multiplied by.
    products: list[Keys] = field(default_factory=list)

    def names(self) -> tuple[str, ...]:
        return (*INDICES, *self.dims, *self.params, *self.lets, *self.tensors, *self.defs)

    def element_type(self, tensor: Tensor) -> Type:
        dtype = tensor.dtype
        if not isinstance(dtype, DType):
            param = self.params[dtype]
            assert isinstance(param, Param), "a tensor whose dtype param is wrong is wrong itself"
            dtype = DType(str(param.choices[0]))
        if dtype is DType.BOOL:
            return "bool"
        return "float" if dtype.is_float else "int"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where an expression stands: in the attention itself, or (`site` is the call) in the body of a def.
    also: names that have a meaning in this statement alone, where the spec has none like them. kind: the
    type of the statement.
    """

    scope: Scope
    report: Reporter
    defs: Mapping[str, Definition]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    site: Span | None = None
    also: Mapping[str, Expr] = field(default_factory=dict)
    kind: Type = "float"

    def enter(self, definition: Definition, arguments: Iterable[Argument], call: Span) -> Context:
        return replace(
            self,
            defs=definition.visible,
            arguments=dict(zip(definition.params, arguments, strict=True)),
            site=self.site or call,
        )

    def meaning(self, name: str) -> Meaning | None:
        if name in self.arguments:
            return self.arguments[name]
        if self.site is None and name in self.scope.refused:
            return WRONG
        if name in INDICES:
            return Index(name)
        if name in self.scope.dims:
            return self.scope.dims[name]
        if self.site is None:
            for kind in (self.scope.params, self.scope.lets, self.scope.tensors):
                if name in kind:
                    return kind[name]
            if name in self.scope.let_places:
                return None  # a let further down
        if self.site is None and name in self.also:
            return self.also[name]
        return self.defs.get(name, INFINITY if name == "inf" else None)

    def span(self, tree: ast.Expr) -> Span:
        """Returns the place in the attention's own text that a node made from `tree` points at."""
        return self.site or tree.span

    def error(
        self,
        code: str,
        message: str,
        span: Span,
        label: str,
        *,
        related: Iterable[Label] = (),
        notes: Iterable[str] = (),
        hints: Iterable[str] = (),
    ) -> None:
        """Reports at the place itself, or, inside the body of a def, at the call."""
        if self.site is not None:
            related = (Label(span, label), *related)
            span, label = self.site, "in the expansion of this"
        self.report.error(code, message, span, label, related=related, notes=notes, hints=hints)
