"""The tree of a spec file: the text as written, without its meaning.

Every node says where it was written in `span`, which equality ignores: two trees are equal when they say the
same. A file is a tuple of items, each of these a tuple of statements, in the order in which they were
written; several statements on one line (`tile.q = 64, stages = 2`) are several statements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from attnc.source import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    span: Span = field(compare=False, repr=False)


# --- expressions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Node):
    """`kv_idx`; schedule keys and targets keep their dots: `tile.q`, `cuda.sm_90a`."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Node):
    """`64`, `0.5`, `1e-6`: the text as written, and an int or a finite float. Signs are `UnaryOp`."""

    text: str
    value: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bool(Node):
    """`true`, `false`"""

    value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryOp(Node):
    """`-x`"""

    op: Literal["-"]
    operand: Expr


ArithmeticOp: TypeAlias = Literal["+", "-", "*", "/", "//", "%"]
CompareOp: TypeAlias = Literal["==", "!=", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryOp(Node):
    """`a + b`; chains lean left: `a - b - c` is `(a - b) - c`"""

    op: ArithmeticOp
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(Node):
    """`a <= b < c`: every neighbouring pair holds; one more operand than operators"""

    operands: tuple[Expr, ...]
    ops: tuple[CompareOp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoolOp(Node):
    """`a and b and c`, `a or b`: at least two operands"""

    op: Literal["and", "or"]
    operands: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Not(Node):
    """`not a`"""

    operand: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword(Node):
    """`page = 16`, inside a call"""

    name: Name
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Node):
    """`window(W, 0)`, `paged(block_table, page = 16)`"""

    function: Name
    args: tuple[Expr, ...] = ()
    kwargs: tuple[Keyword, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscript(Node):
    """`doc[b, q_pos]`; a scalar input is read as `p[]` or plainly as the name `p`"""

    tensor: Name
    indices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListValue(Node):
    """`[kv, q]`, in schedules"""

    items: tuple[Expr, ...]


Expr: TypeAlias = (
    Name | Number | Bool | UnaryOp | BinaryOp | Compare | BoolOp | Not | Call | Subscript | ListValue
)


# --- attention: what is computed ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Node):
    """`param D in {64, 128}`; the first choice is the default"""

    name: Name
    choices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Node):
    """`input k, v: T[B, N, Hkv, D] via paged(block_table, page = 16)`, `input doc: i32[B, N] is sorted`"""

    names: tuple[Name, ...]
    dtype: Name
    shape: tuple[Expr, ...]
    storage: Call | None = None
    facts: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Node):
    """`output lse: f32[B, H, M]`, `output o: bf16[B, M, H, D] = gate[b, q_idx, h] * attention`"""

    name: Name
    dtype: Name
    shape: tuple[Expr, ...]
    value: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Let(Node):
    """`let same_doc = doc[b, q_pos] == doc[b, kv_idx]`"""

    name: Name
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Length(Node):
    """`length N = kv_len[b]`"""

    name: Name
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Node):
    """`score = dot(q, k) / sqrt(D)`"""

    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(Node):
    """`weight = score * sigmoid(score) / N`: what a key counts where nothing is normalised"""

    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask(Node):
    """`mask = causal and q_pos - kv_idx < W`; true keeps"""

    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize(Node):
    """`normalize = softmax(sink = sink[h])`, `normalize = none`"""

    value: Name | Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Node):
    """`order = absolute(2048)`: in which order keys are summed, whatever the schedule"""

    value: Name | Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Grad(Node):
    """`grad q, k, v`, or `grad k, v: f32` for gradients of another type than that of the inputs"""

    names: tuple[Name, ...]
    dtype: Name | None = None


AttentionItem: TypeAlias = (
    Param | Input | Output | Let | Length | Score | Weight | Mask | Normalize | Order | Grad
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Node):
    """`attention NAME { ... }`"""

    name: Name
    items: tuple[AttentionItem, ...]


# --- projection: a linear layer -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation(Node):
    """`y = dot(x, w) + bias[n]`"""

    name: Name
    value: Expr


ProjectionItem: TypeAlias = Param | Input | Output | Equation


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(Node):
    """`projection NAME { ... }`"""

    name: Name
    items: tuple[ProjectionItem, ...]


# --- schedule: how it is computed ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Node):
    """`stages = 2` pins: one value; `stages in {2, 3}` opens a set (`is_set`), the first being the default"""

    key: Name
    values: tuple[Expr, ...]
    is_set: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Where(Node):
    """`where tile.q <= tile.kv`"""

    condition: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Node):
    """`config tile.q = 64, stages in {2, 3}`: configs said outright, keys that it leaves out as around it"""

    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class When(Node):
    """`when D == 256 { ... }`: entries for the variants that the condition holds for"""

    condition: Expr
    entries: tuple[ScheduleEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(Node):
    """`backward { ... }`"""

    name: Name
    entries: tuple[ScheduleEntry, ...]


ScheduleEntry: TypeAlias = Setting | Where | Listed | When | Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Node):
    """`schedule NAME for TARGET as LABEL { ... }`; the name may be that of a projection too"""

    attention: Name
    target: Name
    entries: tuple[ScheduleEntry, ...]
    label: Name | None = None


# --- file ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Def(Node):
    """`def causal = kv_idx <= q_pos`, `def softcap(s, cap) = cap * tanh(s / cap)`"""

    name: Name
    params: tuple[Name, ...]
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment(Node):
    """From '#' to the end of the line, without trailing blanks"""

    text: str


Item: TypeAlias = Def | Attention | Projection | Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class File(Node):
    """A whole file. Comments stand beside the tree, in order; the formatter puts them back by their spans."""

    items: tuple[Item, ...]
    comments: tuple[Comment, ...] = ()
