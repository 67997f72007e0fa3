"""Sizes: what the axes of a shape may be, and when two of them are the same.

A size is a product or sum of dimensions, params and integers, e.g. `Hkv * G` or `B + 1`. A name that is not
reserved and not declared is a dimension of its own, known at run time from the tensors that have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attnc.diagnostics import did_you_mean
from attnc.expr.nodes import Binary, Const, Dim, Expr, Param
from attnc.expr.simplify import make
from attnc.model import attention
from attnc.model.names import DIMS, RESERVED
from attnc.model.report import Report
from attnc.model.scope import Scope, Wrong
from attnc.syntax import ast


@dataclass(slots=True)
class Sizes:
    """Makes the sizes of one attention; adds the free dimensions that it meets to the scope."""

    scope: Scope
    report: Report
    #: Other names of the attention and what they are, for the message when one is used as a size.
    declared: Mapping[str, str]

    def size(self, tree: ast.Expr) -> Expr | None:
        """The size, or None after reporting what is wrong with it."""
        match tree:
            case ast.Name():
                return self._name(tree)
            case ast.Number(value=int() as value) if 1 <= value < 2**31:
                return Const(value, span=tree.span)
            case ast.BinaryOp(op="+" | "-" | "*" | "//" as op):
                left, right = self.size(tree.left), self.size(tree.right)
                if left is None or right is None:
                    return None
                return make(Binary(op, left, right, span=tree.span), (left, right))
        self.report.error(
            "E0308", "not a size", tree.span, "an axis is a name, a positive integer, or + - * // of these"
        )
        return None

    def _name(self, tree: ast.Name) -> Expr | None:
        name, scope = tree.id, self.scope
        if name in scope.dims:
            return replace(scope.dims[name], span=tree.span)
        param = scope.params.get(name)
        if isinstance(param, Wrong):
            return None
        if isinstance(param, attention.Param):
            if all(type(choice) is int for choice in param.choices):
                return Param(name, "int", span=tree.span)
            self.report.error(
                "E0308", f"param '{name}' is not a size", tree.span, "its choices are not integers"
            )
            return None
        what = self.declared.get(name) or RESERVED.get(name)
        if what is not None:
            self.report.error(
                "E0308", f"'{name}' is not a size", tree.span, f"{what}", hints=did_you_mean(name, DIMS)
            )
            return None
        scope.dims[name] = Dim(name)
        return Dim(name, span=tree.span)
