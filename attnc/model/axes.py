"""What each axis of q, k, v, o and lse is, read off the names in its shape: sequences, rows, heads, the head
dimension. Any order with the head dimension last is a layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnc.diagnostics import Reporter, did_you_mean
from attnc.expr.nodes import Const, Dim, Expr, walk
from attnc.model.names import DIMS
from attnc.model.tensors import Role, is_static
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
    name: ast.Name, axes: Sequence[Expr], trees: Sequence[ast.Expr], *, ragged: bool, report: Reporter
) -> tuple[Role, ...] | None:
    """Returns a role for each axis, or None after reporting what is wrong."""
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
    if _report_numbers(name, roles, axes, trees, ragged, report):
        return None
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


def _feature(name: str, axis: Expr, tree: ast.Expr, report: Reporter) -> Role | None:
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


def _role(name: str, axis: Expr, tree: ast.Expr, ragged: bool, report: Reporter) -> Role | None:
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
        _describe_expected(name, ragged),
        hints=hints,
    )
    return None


def _report_numbers(
    name: ast.Name,
    roles: Sequence[Role],
    axes: Sequence[Expr],
    trees: Sequence[ast.Expr],
    ragged: bool,
    report: Reporter,
) -> bool:
    """Reports numbers where sequences or rows are counted, as in `[1, 577, 12, 64]`; returns if there are."""
    numbers = {
        i: axis.value
        for i, (role, axis) in enumerate(zip(roles, axes, strict=True))
        if role is Role.HEAD and isinstance(axis, Const)
    }
    rows = _ROWS[name.id]
    missing = [
        role for role in (Role.BATCH, rows) if role not in roles and not (ragged and role is Role.BATCH)
    ]
    if not missing or len(missing) != roles.count(Role.HEAD) - 1 or len(missing) > len(numbers):
        return False
    # Sequences are counted first, as a rule, and there are more rows than heads.
    instead = {min(numbers): "B"} if Role.BATCH in missing else {}
    left = {i: value for i, value in numbers.items() if i not in instead}
    if rows in missing:
        instead[max(left, key=lambda i: left[i])] = "T" if ragged else _LENGTH[rows]
    shape = ", ".join(instead.get(i, tree.span.text) for i, tree in enumerate(trees))
    word = "axis of rows" if ragged else _WORDS[missing[0]]
    report.error(
        "E0309",
        f"{name.id} has no {word}",
        trees[min(instead)].span,
        "a number counts heads",
        hints=(f"write '[{shape}]': how many sequences and rows there are is known at the call",),
    )
    return True


def _report_count(name: ast.Name, role: Role, places: Sequence[Span], ragged: bool, report: Reporter) -> None:
    word = "axis of rows" if ragged and role in _LENGTH else _WORDS[role]
    one_sequence = "declare the axis 'B': a single sequence is passed as x[None]"
    hints: tuple[str, ...]
    if places:
        hints = ()
        message, at = f"{name.id} has more than one {word}", places[1]
    else:
        hints = {Role.HEAD: ("write '1' for a single head",), Role.BATCH: (one_sequence,)}.get(role, ())
        message, at = f"{name.id} has no {word}", name.span
    report.error("E0309", message, at, _describe_expected(name.id, ragged), hints=hints)


def _describe_expected(name: str, ragged: bool) -> str:
    return f"expected a layout like {(_SHOWN_RAGGED if ragged else _SHOWN)[name]}"
