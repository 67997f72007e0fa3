"""How many keys a sequence has, as text that `support.pages.count_keys` evaluates for all of them at once."""

from __future__ import annotations

from attnc.expr.functions import REAL
from attnc.expr.nodes import And, Binary, Call, Compare, Const, Dim, Expr, Index, Load, Neg, Not, Or

#: What operations are called whose operator would do something else with tensors, or with sizes that are 0.
_CALLED = {"//": "quotient", "%": "remainder", "/": "ratio", "min": "least", "max": "most", "abs": "absolute"}


def show_length(expr: Expr) -> str:
    """Returns the text of an expression of sizes, of `b` and of loads by these."""
    match expr:
        case Const(value=value):
            return repr(value)
        case Dim(name=name) | Index(name=name):
            return name
        case Load(tensor=tensor, indices=indices):
            return f"at({', '.join((tensor, *map(show_length, indices)))})"
        case Neg(operand=operand):
            return f"-{_within(operand)}"
        case Not(operand=operand):
            return f"{_within(operand)} == 0"
        case And(operands=operands) | Or(operands=operands):
            sign = " & " if isinstance(expr, And) else " | "
            return sign.join(map(_within, operands))
        case Binary(op=op, left=left, right=right) if op in _CALLED:
            return f"{_CALLED[op]}({show_length(left)}, {show_length(right)})"
        case Binary(op=op, left=left, right=right) | Compare(op=op, left=left, right=right):
            return f"{_within(left)} {op} {_within(right)}"
        case Call(function=function, args=args) if function in REAL:
            return f"real({function!r}, {', '.join(map(show_length, args))})"
        case Call(function=function, args=args):
            return f"{_CALLED.get(function, function)}({', '.join(map(show_length, args))})"
    raise ValueError(f"no length of a sequence: {expr}")


def _within(expr: Expr) -> str:
    text = show_length(expr)
    is_whole = isinstance(expr, Dim | Index | Load | Call) or (isinstance(expr, Const) and text[0] != "-")
    is_whole |= isinstance(expr, Binary) and expr.op in _CALLED
    return text if is_whole else f"({text})"
