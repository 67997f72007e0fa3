"""Expression trees from their spec text, by way of Python's own parser: here the two notations agree."""

from __future__ import annotations

import ast

from attnc.expr.functions import FUNCTIONS
from attnc.expr.nodes import (
    INFINITY,
    And,
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    Load,
    Neg,
    Not,
    Or,
    Type,
)

B, H, M, N = Dim("B"), Dim("H"), Dim("M"), Dim("N")

#: name -> (extents, type, is_sorted) of the inputs that test expressions load from.
TENSORS: dict[str, tuple[tuple[Expr, ...], Type, bool]] = {
    "kv_len": ((B,), "int", False),
    "prefix": ((B,), "int", False),
    "doc": ((B, N), "int", True),
    "tag": ((B, N), "int", False),
    "width": ((H,), "int", False),
    "slope": ((H,), "float", False),
    "time": ((B, N), "float", True),
    "bias": ((H, M, N), "float", False),
    "flag": ((B,), "bool", False),
    "keep": ((B, N), "bool", False),
    "limit": ((B,), "int", False),
    "stamp": ((B, N), "int", True),
}
#: Those of 64 bits.
WIDE = ("limit", "stamp")

BINARY: dict[type[ast.operator], BinaryOp] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], CompareOp] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
INDICES = ("b", "h", "q_idx", "q_pos", "kv_idx", "q_lo", "q_hi", "kv_lo", "kv_hi")


def spell(text: str) -> Expr:
    """The tree that a spec with the inputs `TENSORS` would hold for this text, not simplified."""
    return _tree(ast.parse(text, mode="eval").body)


def _tree(node: ast.expr) -> Expr:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return Const(value)
        case ast.Name(id="true" | "false" as name):
            return Const(name == "true")
        case ast.Name(id="inf"):
            return INFINITY
        case ast.Name(id=name):
            return Index(name) if name in INDICES else Dim(name)
        case ast.Subscript(value=ast.Name(id=tensor), slice=key):
            indices = key.elts if isinstance(key, ast.Tuple) else [key]
            return load(tensor, *map(_tree, indices))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Neg(_tree(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Not(_tree(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return Binary(BINARY[type(op)], _tree(left), _tree(right))
        case ast.BoolOp(op=ast.And(), values=values):
            return And(tuple(map(_tree, values)))
        case ast.BoolOp(values=values):
            return Or(tuple(map(_tree, values)))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_tree(term) for term in (left, *comparators)]
            links = [
                Compare(COMPARE[type(op)], a, b) for op, a, b in zip(ops, terms, terms[1:], strict=False)
            ]
            return links[0] if len(links) == 1 else And(tuple(links))
        case ast.Call(func=ast.Name(id="dot")):
            return Dot()
        case ast.Call(func=ast.Name(id=function), args=args) if len(args) == FUNCTIONS[function]:
            return Call(function, tuple(map(_tree, args)))
    raise ValueError(ast.unparse(node))


def load(tensor: str, *indices: Expr) -> Load:
    extents, kind, is_sorted = TENSORS[tensor]
    return Load(tensor, indices, extents, kind, is_sorted, wide=tensor in WIDE)
