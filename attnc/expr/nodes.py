"""The typed expression tree: what a mask, a score or a tile bound *is*, once every name is resolved; `show`
writes one as spec text.

A tree has no names left to look up and no sugar: `let`s and `def`s are inlined, chained comparisons are
conjunctions, params are constants after `model.variants`. Every node knows its type and the span of spec
text it came from; spans never take part in equality, so two spellings of one formula compare equal.

Semantics, in one place (`evaluate.py` implements them, every target must agree):

* ``int`` is a 64-bit integer, ``float`` is a real number (targets compute it in float32), ``bool`` is true or
  false;
* ``//`` and ``%`` are floor division and its non-negative-for-positive-divisor remainder, as in Python; by 0
  both give 0;
* ``and``, ``or`` and ``where`` evaluate all operands; no operand can fail;
* a load whose index lies outside its tensor reads 0 (false), so every expression is total;
* ``bit(word, i)`` is bit i of 64, the lowest first, of an integer in two's complement; false for any other i;
* an ``int`` operand of a float operation is converted; ``/`` always gives a float;
* ``inf`` is a float constant; a score of ``-inf`` is an excluded key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Literal, TypeAlias, TypeVar

from attnc.effort import memo, spend
from attnc.source import Span

Type: TypeAlias = Literal["bool", "int", "float"]
_T = TypeVar("_T")
BinaryOp: TypeAlias = Literal["+", "-", "*", "/", "//", "%"]
CompareOp: TypeAlias = Literal["==", "!=", "<", "<=", ">", ">="]

#: Logical coordinates of one score. `q_pos` is q_idx + N - M: the bottom-right aligned position of the query.
INDICES = ("b", "h", "q_idx", "q_pos", "kv_idx")
#: The coordinate of an epilogue that scores do not have: the column of o.
COLUMN = "d"
#: Constants of specs stay below: with a position, and what bounds of tiles add, they still fit into 64 bits.
MAX_INTEGER = 1 << 62


class _FoundOnce:
    """The places of what is found of a node once: its hash, and the nodes below it, parents first."""

    __slots__ = ("_below", "_hash")
    _hash: int
    _below: tuple[Expr, ...]


def _hashed_once(node: type[_T]) -> type[_T]:
    """Returns a class whose objects walk their tree for a hash once: trees are keys of what is remembered."""
    compute = node.__hash__

    def hash_of(self: Any) -> int:
        try:
            known: int = self._hash
        except AttributeError:
            known = compute(self)
            object.__setattr__(self, "_hash", known)
        return known

    node.__hash__ = hash_of  # type: ignore[method-assign]  # the same, remembered
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(_FoundOnce):
    """Common to all nodes: where in the spec it was written (None for nodes that the compiler made)."""

    span: Span | None = field(default=None, compare=False, repr=False)


@_hashed_once
@dataclass(frozen=True, slots=True)
class Const(Node):
    """A constant of the language; True, 1 and 1.0 are different ones."""

    value: bool | int | float

    @property
    def type(self) -> Type:
        match self.value:
            case bool():
                return "bool"
            case int():
                return "int"
            case _:
                return "float"

    # Python has True == 1 == 1.0; here they are different constants.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and (self.type, self.value) == (other.type, other.value)

    def __hash__(self) -> int:
        return hash((self.type, self.value))


@_hashed_once
@dataclass(frozen=True, slots=True)
class Index(Node):
    """A coordinate of the score (`INDICES`), or its inclusive bound over a tile: `q_lo`, `q_hi`, ..."""

    name: str
    type: Literal["int"] = "int"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Dim(Node):
    """A size known at run time: B, M, N, H, Hkv, G, or any other name used in a shape.

    M and N are the lengths of the *sequence at hand*: with ragged or paged storage they depend on b.
    """

    name: str
    type: Literal["int"] = "int"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Param(Node):
    """A compile-time parameter of the spec, before `model.variants` replaces it by a constant."""

    name: str
    type: Type


@_hashed_once
@dataclass(frozen=True, slots=True)
class Dot(Node):
    """dot(q, k): query row q_idx times key row kv_idx of head h, accumulated in float32."""

    type: Literal["float"] = "float"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Attended(Node):
    """`attention`, in an epilogue: the normalised sum over the keys, of row q_idx and column d of head h, in
    float32.
    """

    type: Literal["float"] = "float"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Load(Node):
    """`tensor[indices]`; 0 outside the tensor.

    `extents` are its sizes, for bounds checks; `is_sorted`: ascending along the last axis; wide: an integer
    of 64 bits; is_byte: of 8, without a sign; within: the least and the most that it counts as, where what
    lies beyond makes no difference.
    """

    tensor: str
    indices: tuple[Expr, ...]
    extents: tuple[Expr, ...]
    type: Type
    is_sorted: bool = False
    wide: bool = False
    is_byte: bool = False
    within: tuple[int, int] | None = None


@_hashed_once
@dataclass(frozen=True, slots=True)
class Neg(Node):
    """-operand, of the type of the operand."""

    operand: Expr

    @property
    def type(self) -> Type:
        return self.operand.type


@_hashed_once
@dataclass(frozen=True, slots=True)
class Binary(Node):
    """left <op> right, one of + - * / // %: float if an operand is or the op is `/`, else int."""

    op: BinaryOp
    left: Expr
    right: Expr

    @property
    def type(self) -> Type:
        return "float" if self.op == "/" or "float" in (self.left.type, self.right.type) else "int"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Compare(Node):
    """left <op> right, a condition on two numbers or, for == and !=, on two conditions."""

    op: CompareOp
    left: Expr
    right: Expr
    type: Literal["bool"] = "bool"


@_hashed_once
@dataclass(frozen=True, slots=True)
class And(Node):
    """All operands hold."""

    operands: tuple[Expr, ...]
    type: Literal["bool"] = "bool"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Or(Node):
    """One of the operands holds."""

    operands: tuple[Expr, ...]
    type: Literal["bool"] = "bool"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Not(Node):
    """The operand does not hold."""

    operand: Expr
    type: Literal["bool"] = "bool"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Call(Node):
    """An intrinsic of `functions.FUNCTIONS`.

    min/max of two ints is an int; `where` takes the type of its branches; `bit` is a bool; the rest are
    float.
    """

    function: str
    args: tuple[Expr, ...]

    @property
    def type(self) -> Type:
        match self.function:
            case "abs":
                return self.args[0].type
            case "min" | "max":
                return "float" if "float" in (self.args[0].type, self.args[1].type) else "int"
            case "where":
                branches = (self.args[1].type, self.args[2].type)
                return "float" if "float" in branches else branches[0]
            case "bit":
                return "bool"
            case _:
                return "float"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Search(Node):
    """Binary search in the last axis of a sorted tensor.

    The first position whose value is >= (`lower`) or > (`upper`) `value`; of one that descends, <= or <.
    Lies in 0..extent; reads outside the tensor give 0, as in a Load. Appears only in tile bounds, where it
    turns `doc[b, kv_idx] == x` into a range of kv_idx. `row` names a pointer to the tensor at the first
    `done` indices of `prefix`, once a plan has made one. limit: how many elements are looked at; None: as
    many as the axis has.
    """

    side: Literal["lower", "upper"]
    tensor: str
    prefix: tuple[Expr, ...]
    extents: tuple[Expr, ...]
    value: Expr
    row: str | None = None
    done: int = 0
    limit: Expr | None = None
    descends: bool = False
    type: Literal["int"] = "int"

    @property
    def length(self) -> Expr:
        return self.extents[-1] if self.limit is None else self.limit


@_hashed_once
@dataclass(frozen=True, slots=True)
class InList(Node):
    """Whether a list names `entry`: tensor[*indices, s] == entry for some s, which is below `limit` if there
    is one.

    indices: of every axis but the last, along which the list lies; a list outside of the tensor is empty.
    """

    tensor: str
    indices: tuple[Expr, ...]
    extents: tuple[Expr, ...]
    entry: Expr
    limit: Expr | None = None
    type: Literal["bool"] = "bool"

    @property
    def keys(self) -> int:
        match self.entry:
            case Binary(op="//", left=Index(name="kv_idx"), right=Const(value=int() as keys)):
                return keys
            case Index(name="kv_idx"):
                return 1
        raise ValueError(f"an entry of a list of keys is not {show(self.entry)}")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Ref(Node):
    """A value that the kernel text has given a name, e.g. a load hoisted out of the loop.

    `axes` is a subset of ("q", "kv"): what the value varies along. natural: it is known to be >= 0. wide: an
    integer of 64 bits. within: the least and the most that an integer is known to be.
    """

    name: str
    type: Type
    axes: tuple[str, ...] = ()
    natural: bool = False
    wide: bool = False
    within: tuple[int, int] | None = None


Expr: TypeAlias = (
    Const
    | Index
    | Dim
    | Param
    | Dot
    | Attended
    | Load
    | Neg
    | Binary
    | Compare
    | And
    | Or
    | Not
    | Call
    | Search
    | InList
    | Ref
)

INFINITY = Const(float("inf"))
TRUE = Const(True)
FALSE = Const(False)


def children(expr: Expr) -> tuple[Expr, ...]:
    """Returns the direct operands of a node, in source order."""
    spend()
    return _children(expr)


def _children(expr: Expr) -> tuple[Expr, ...]:
    found: Callable[[Any], tuple[Expr, ...]] | None = _CHILDREN.get(type(expr))
    return () if found is None else found(expr)


#: The operands of a node by its class: expressions are walked more often than anything else is done to them.
_CHILDREN: Mapping[type, Callable[[Any], tuple[Expr, ...]]] = {
    Load: attrgetter("indices"),
    Search: lambda node: (*node.prefix, node.value, *(() if node.limit is None else (node.limit,))),
    InList: lambda node: (*node.indices, node.entry, *(() if node.limit is None else (node.limit,))),
    Neg: lambda node: (node.operand,),
    Not: lambda node: (node.operand,),
    Binary: attrgetter("left", "right"),
    Compare: attrgetter("left", "right"),
    And: attrgetter("operands"),
    Or: attrgetter("operands"),
    Call: attrgetter("args"),
}


def walk(expr: Expr) -> Iterator[Expr]:
    """Yields every node of the tree, parents first."""
    try:
        below = expr._below
        spend(1 + len(below))
    except AttributeError:
        _, *found = _list_nodes(expr)
        below = tuple(found)
        object.__setattr__(expr, "_below", below)
    return chain((expr,), below)


def _list_nodes(expr: Expr) -> Iterator[Expr]:
    left = [expr]
    while left:
        node = left.pop()
        yield node
        spend()
        if (found := _CHILDREN.get(type(node))) is not None:
            left += reversed(found(node))


def rebuild(expr: Expr, operands: tuple[Expr, ...]) -> Expr:
    """Makes the same node over other operands (as many as `children` gave)."""
    if all(map(is_, operands, _children(expr))):
        return expr
    match expr:
        case Load():
            return replace(expr, indices=operands)
        case Search(prefix=prefix):
            value, *limit = operands[len(prefix) :]
            return replace(
                expr, prefix=operands[: len(prefix)], value=value, limit=limit[0] if limit else None
            )
        case InList(indices=indices):
            entry, *limit = operands[len(indices) :]
            return replace(
                expr, indices=operands[: len(indices)], entry=entry, limit=limit[0] if limit else None
            )
        case Neg() | Not():
            return replace(expr, operand=operands[0])
        case Binary() | Compare():
            return replace(expr, left=operands[0], right=operands[1])
        case And() | Or():
            return replace(expr, operands=operands)
        case Call():
            return replace(expr, args=operands)
        case _:
            return expr


def uses(expr: Expr) -> frozenset[str]:
    """Returns names of the indices that the value depends on, with q_pos counted as q_idx."""
    names = {node.name for node in walk(expr) if isinstance(node, Index)}
    return frozenset("q_idx" if name == "q_pos" else name for name in names)


# Binding strength, weakest first; the grammar's order.
_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _NEG, _ATOM = range(8)


# --- as spec text


def show(expr: Expr) -> str:
    """Returns the expression in the notation of a spec, with as few parentheses as keep its structure.

    Comparisons that share an operand are chained again; a Search, which no spec can write, reads
    `first(doc[b, :] >= x)`: the first position that satisfies it.
    """
    return _show(expr)[0]


@memo
def _show(expr: Expr) -> tuple[str, int]:
    spend()
    match expr:
        case Const(value=bool() as value):
            return str(value).lower(), _ATOM
        case Const(value=value):
            return repr(value), _NEG if value < 0 else _ATOM
        case Index(name=name) | Dim(name=name) | Param(name=name) | Ref(name=name):
            return name, _ATOM
        case Dot():
            return "dot(q, k)", _ATOM
        case Attended():
            return "attention", _ATOM
        case Load(tensor=tensor, indices=indices):
            return (f"{tensor}[{_list(indices)}]" if indices else tensor), _ATOM
        case Search(side=side, tensor=tensor, prefix=prefix, value=value, descends=descends):
            row = ", ".join((*map(show, prefix), ":"))
            past = f"{'<' if descends else '>'}{'=' if side == 'lower' else ''}"
            return f"first({tensor}[{row}] {past} {_operand(value, _SUM)})", _ATOM
        case InList():
            return _show_listed(expr), _ATOM
        case Call(function=function, args=args):
            return f"{function}({_list(args)})", _ATOM
        case Neg(operand=operand):
            return f"-{_operand(operand, _NEG)}", _NEG
        case Binary(op=op, left=left, right=right):
            strength = _SUM if op in ("+", "-") else _PRODUCT
            return f"{_operand(left, strength)} {op} {_operand(right, strength + 1)}", strength
        case Compare(op=op, left=left, right=right):
            return f"{_operand(left, _SUM)} {op} {_operand(right, _SUM)}", _COMPARE
        case Not(operand=operand):
            return f"not {_operand(operand, _NOT)}", _NOT
        case And(operands=operands):
            parts = _chains(operands)
            return " and ".join(parts), _AND if len(parts) > 1 else _COMPARE
        case Or(operands=operands):
            return " or ".join(_operand(operand, _OR + 1) for operand in operands), _OR


def _show_listed(expr: InList) -> str:
    match expr.entry:
        case Binary(op="//", left=Index(name="kv_idx"), right=keys):
            of = f"keys = {show(keys)}"
        case _:
            of = "keys = 1"
    count = "" if expr.limit is None else f", count = {show(expr.limit)}"
    row = f"{expr.tensor}[{_list(expr.indices)}]" if expr.indices else expr.tensor
    return f"listed({row}, {of}{count})"


def _operand(expr: Expr, at_least: int) -> str:
    text, strength = _show(expr)
    return text if strength >= at_least else f"({text})"


def _list(exprs: tuple[Expr, ...]) -> str:
    return ", ".join(map(show, exprs))


def _chains(operands: tuple[Expr, ...]) -> list[str]:
    """Returns the operands of a conjunction; neighbours `a <= b`, `b < c` as `a <= b < c`."""
    parts: list[str] = []
    last: Compare | None = None
    for operand in operands:
        if isinstance(operand, Compare):
            if last is not None and operand.left == last.right and operand.op[0] == last.op[0] in ("<", ">"):
                parts[-1] += f" {operand.op} {_operand(operand.right, _SUM)}"
            else:
                parts.append(_operand(operand, _NOT))
            last = operand
        else:
            parts.append(_operand(operand, _NOT))
            last = None
    return parts
