"""Where a score or a derivative of it may be no finite number, as far as its expression tells."""

from __future__ import annotations

from attnc.expr.nodes import Binary, Call, Const, Dot, Expr, Load, Ref, walk


def is_finite(value: Expr) -> bool:
    """Whether the value is a finite number wherever its indices are: it reads nothing and divides by
    nothing.
    """
    return not any(
        isinstance(node, Dot | Load)
        or (isinstance(node, Ref) and node.type == "float")
        or (isinstance(node, Binary) and node.op == "/")
        or (isinstance(node, Call) and node.function in ("exp", "log", "sqrt"))
        for node in walk(value)
    )


def has_pole(value: Expr) -> bool:
    """Whether the value can be infinite at zeros, which is what rows and keys past the end are loaded as."""
    return any(
        (isinstance(node, Binary) and node.op == "/" and not isinstance(node.right, Const))
        or (isinstance(node, Call) and node.function == "log")
        for node in walk(value)
    )
