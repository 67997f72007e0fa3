"""What names mean: in an attention, and in the bodies of the defs that it calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, TypeAlias

from attnc.diagnostics import Label
from attnc.expr.nodes import INDICES, INFINITY, Expr, Index, Type
from attnc.model.attention import Param
from attnc.model.definitions import Definition
from attnc.model.report import Report
from attnc.model.tensors import DType, Tensor
from attnc.source import Span
from attnc.syntax import ast


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

    def names(self) -> tuple[str, ...]:
        """Every name that an expression may use, besides intrinsics."""
        return (*INDICES, *self.dims, *self.params, *self.lets, *self.tensors, *self.defs)

    def element_type(self, tensor: Tensor) -> Type:
        """The type of what an expression loads from the tensor."""
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
    """Where an expression stands: in the attention itself, or (`site` is the call) in the body of a def."""

    scope: Scope
    report: Report
    defs: Mapping[str, Definition]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    site: Span | None = None

    def enter(self, definition: Definition, arguments: Iterable[Argument], call: Span) -> Context:
        """The context of a def's body."""
        return replace(
            self,
            defs=definition.visible,
            arguments=dict(zip(definition.params, arguments, strict=True)),
            site=self.site or call,
        )

    def meaning(self, name: str) -> Meaning | None:
        """What the name stands for here; None if nothing."""
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
        return self.defs.get(name, INFINITY if name == "inf" else None)

    def span(self, tree: ast.Expr) -> Span:
        """The place in the attention's own text that a node made from `tree` points at."""
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
        """Report at the place itself, or, inside the body of a def, at the call."""
        if self.site is not None:
            related = (Label(span, label), *related)
            span, label = self.site, "in the expansion of this"
        self.report.error(code, message, span, label, related=related, notes=notes, hints=hints)
