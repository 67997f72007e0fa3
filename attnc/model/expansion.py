"""Limits on what lets and defs expand to, and on all that a file costs: a short hostile spec must not make a
long or deep expression, nor much work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from attnc.diagnostics import DiagnosticError, error
from attnc.effort import MAX_STEPS, Exhausted
from attnc.expr.nodes import Expr, children
from attnc.model.scope import Context
from attnc.source import Span
from attnc.syntax import ast

MAX_NODES = 4096
#: Levels of the result, and of expressions inside of expressions on the way: far from Python's own limit.
MAX_DEPTH = 96
#: Calls of defs that one attention may expand to.
MAX_CALLS = 10_000


@dataclass(slots=True)
class Expansion:
    """What one attention has expanded to so far."""

    calls: int = 0
    level: int = 0
    #: Operations and levels of nodes by id; each entry keeps its node alive, so that ids stay unique.
    _extents: dict[int, tuple[Expr, int, int]] = field(default_factory=dict)

    def fits(self, expr: Expr) -> bool:
        """Whether the tree is small enough to walk."""
        size, depth = self._extent(expr)
        return size <= MAX_NODES and depth <= MAX_DEPTH

    def _extent(self, expr: Expr) -> tuple[int, int]:
        """Operations and levels of a tree; shared parts count each time, as a walk sees them."""
        if id(expr) not in self._extents:
            parts = [self._extent(child) for child in children(expr)]
            size, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
            self._extents[id(expr)] = (expr, size, depth)
        return self._extents[id(expr)][1:]


def report_expansion(tree: ast.Expr, at: Context) -> None:
    at.error(
        "E0506",
        "expression that expands too far",
        tree.span,
        "lets and defs are expanded where they are used",
        notes=(f"the limits are {MAX_NODES} operations, {MAX_DEPTH} levels and {MAX_CALLS} calls of defs",),
    )


_NOTE = (
    f"a file may cost {MAX_STEPS:,} steps, each about one operation of an expression that is looked at; "
    "variants, schedules and configs are looked at one by one"
)


@contextmanager
def charged(what: str, span: Span) -> Iterator[None]:
    """Makes a diagnostic of it when the steps that a file may cost are spent in the block."""
    try:
        yield
    except Exhausted:
        raise DiagnosticError(
            [
                error(
                    "E0510",
                    "the file is too much work",
                    span,
                    f"the limit was reached in {what}",
                    notes=(_NOTE,),
                    hints=("divide the file, or have fewer params, choices or terms",),
                )
            ]
        ) from None
