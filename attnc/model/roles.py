"""Roles of the axes of q, k, v, o and lse, read off their shapes.

Any order with the head dimension last is a layout: [B, M, H, D], [B, H, M, D], ... A ragged tensor has no
batch axis and one axis of rows of all sequences, under a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnc.diagnostics import did_you_mean
from attnc.expr.nodes import Dim, Expr, walk
from attnc.model.names import DIMS
from attnc.model.products import is_static
from attnc.model.report import Report
from attnc.model.tensors import Role
from attnc.source import Span
from attnc.syntax import ast

_ROWS = {"q": Role.QUERY, "k": Role.KEY, "v": Role.KEY, "o": Role.QUERY, "lse": Role.QUERY}
_LENGTH = {Role.QUERY: "M", Role.KEY: "N"}
_SHOWN = {
    "q": "[B, M, H, D]",
    "k": "[B, N, H, D]",
    "v": "[B, N, H, D]",
    "o": "[B, M, H, D]",
    "lse": "[B, H, M]",
}
_SHOWN_RAGGED = {"q": "[T, H, D]", "k": "[S, H, D]", "v": "[S, H, D]", "o": "[T, H, D]", "lse": "[T, H]"}
_WORDS = {
    Role.BATCH: "batch axis 'B'",
    Role.QUERY: "query axis 'M'",
    Role.KEY: "key axis 'N'",
    Role.HEAD: "head axis",
    Role.FEATURE: "head dimension",
}


def infer_roles(
    name: ast.Name, axes: Sequence[Expr], trees: Sequence[ast.Expr], *, ragged: bool, report: Report
) -> tuple[Role, ...] | None:
    """A role for each axis, or None after reporting what is wrong."""
    has_feature = name.id != "lse"
    roles: list[Role] = []
    for i, (axis, tree) in enumerate(zip(axes, trees, strict=True)):
        is_feature = has_feature and i == len(axes) - 1
        role = (
            _feature(name.id, axis, tree, report)
            if is_feature
            else _role(name.id, axis, tree, ragged, report)
        )
        if role is None:
            return None
        roles.append(role)
    wanted = [_ROWS[name.id], Role.HEAD]
    wanted += [] if ragged else [Role.BATCH]
    wanted += [Role.FEATURE] if has_feature else []
    for role in wanted:
        if roles.count(role) != 1:
            _report_count(
                name,
                role,
                [tree.span for r, tree in zip(roles, trees, strict=True) if r is role],
                ragged,
                report,
            )
            return None
    return tuple(roles)


def _feature(name: str, axis: Expr, tree: ast.Expr, report: Report) -> Role | None:
    if is_static(axis):
        return Role.FEATURE
    report.error(
        "E0310",
        f"the last axis of {name} must be its head dimension",
        tree.span,
        "a size known only at run time",
        notes=("head dimensions are compile-time: D, Dv, a number or a param",),
    )
    return None


def _role(name: str, axis: Expr, tree: ast.Expr, ragged: bool, report: Report) -> Role | None:
    rows = _ROWS[name]
    names = {node.name for node in walk(axis) if isinstance(node, Dim)}
    if names <= {"H", "Hkv", "G"}:
        return Role.HEAD
    if isinstance(axis, Dim) and ragged:
        if axis.name not in DIMS:
            return rows
        hints: tuple[str, ...] = (
            ("a ragged tensor has no batch axis; its sequences follow each other",)
            if axis.name == "B"
            else (f"name the rows of all sequences, e.g. 'T': {axis.name} is the length of one",)
        )
    elif isinstance(axis, Dim) and axis.name == "B":
        return Role.BATCH
    elif isinstance(axis, Dim) and axis.name == _LENGTH[rows]:
        return rows
    elif isinstance(axis, Dim) and axis.name in ("M", "N"):
        hints = (f"rows of {name} are counted by {_LENGTH[rows]}",)
    else:
        hints = did_you_mean(tree.id, DIMS) if isinstance(tree, ast.Name) else ()
    report.error(
        "E0309",
        f"'{tree.span.text}' is not an axis of {name}",
        tree.span,
        _expected(name, ragged),
        hints=hints,
    )
    return None


def _report_count(name: ast.Name, role: Role, places: Sequence[Span], ragged: bool, report: Report) -> None:
    word = "axis of rows" if ragged and role in _LENGTH else _WORDS[role]
    if places:
        report.error("E0309", f"{name.id} has more than one {word}", places[1], _expected(name.id, ragged))
    else:
        hints = ("write '1' for a single head",) if role is Role.HEAD else ()
        report.error("E0309", f"{name.id} has no {word}", name.span, _expected(name.id, ragged), hints=hints)


def _expected(name: str, ragged: bool) -> str:
    return f"expected a layout like {(_SHOWN_RAGGED if ragged else _SHOWN)[name]}"
