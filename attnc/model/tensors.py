"""Tensors of an attention: shapes by role, storage; sizes as products, when two are equal, and
when one divides another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, TypeAlias

from attnc.effort import memo
from attnc.expr.nodes import Binary, Const, Dim, Expr, Load, Param, children, rebuild, walk
from attnc.model.dtypes import DType
from attnc.source import Span


def is_static(size: Expr) -> bool:
    """Returns whether the size is known at compile time."""
    return not any(isinstance(node, Dim) for node in walk(size))


def same_size(left: Expr, right: Expr) -> bool:
    """Returns whether two sizes are equal whatever the dimensions are; products may be in any order."""
    return left == right or ((factors := _factors(left)) is not None and factors == _factors(right))


def group_size(heads_q: Expr, heads_kv: Expr) -> Expr | None:
    """Returns heads_q / heads_kv, when it is an integer whatever the dimensions are, else None."""
    q, kv = _factors(heads_q), _factors(heads_kv)
    if q is None or kv is None or q[0] % kv[0] or kv[1] - q[1]:
        return None
    made: Expr | None = Const(q[0] // kv[0]) if q[0] != kv[0] else None
    for factor in (q[1] - kv[1]).elements():
        made = factor if made is None else Binary("*", made, factor)
    return made or Const(1)


@memo
def _factors(size: Expr) -> tuple[int, Counter[Expr]] | None:
    """Returns the integer factor and the names of a product; None for what is not a product of positive
    factors.
    """
    match size:
        case Const(value=int() as value) if value > 0:
            return value, Counter()
        case Dim() | Param():
            return 1, Counter({size: 1})
        case Binary(op="*", left=left, right=right):
            a, b = _factors(left), _factors(right)
            return (a[0] * b[0], a[1] + b[1]) if a and b else None
        case _:
            return None


def size_loads(expr: Expr, dtypes: Mapping[str, DType]) -> Expr:
    """Returns the expression with its loads marked by the sizes of their integers, which bounds go by."""
    expr = rebuild(expr, tuple(size_loads(child, dtypes) for child in children(expr)))
    match expr:
        case Load(tensor=tensor, type="int") if dtypes.get(tensor) is DType.I64:
            return replace(expr, wide=True)
        case Load(tensor=tensor, type="int") if dtypes.get(tensor) is DType.U8:
            return replace(expr, is_byte=True)
        case _:
            return expr


class Role(StrEnum):
    """What an axis of q, k, v or an output counts."""

    BATCH = "batch"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"
    FEATURE = "feature"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all storages say of themselves.

    name: as messages call it; is_packed: the rows of all sequences follow each other, so that there is no
    batch axis; is_paged: they lie in pages; is_part: they are part of another tensor's and have no memory of
    their own.
    """

    name: ClassVar[str]
    is_packed: ClassVar[bool] = False
    is_paged: ClassVar[bool] = False
    is_part: ClassVar[bool] = False
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        return not (self.is_packed or self.is_paged or self.is_part)

    @property
    def ends(self) -> str:
        return ""

    @property
    def table(self) -> str:
        """The input that says in which pages rows lie; "" where they lie in none."""
        return ""

    @property
    def rows_of_page(self) -> int:
        return 0

    @property
    def page_param(self) -> str:
        """The param that the size of a page is, until `variants` fixes it; "" where it is a number."""
        return ""

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(name for name in (self.table, self.ends) if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(Kind):
    """An ordinary strided tensor."""

    name: ClassVar[str] = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged(Kind):
    """K/V rows in pages of `page` rows, found through `block_table[b, kv_idx // page]`.

    param: the name of the param that the size of a page is, until `variants` fixes it; `page` is its default.
    """

    name: ClassVar[str] = "paged"
    is_paged: ClassVar[bool] = True
    block_table: str
    page: int
    param: str = ""

    @property
    def table(self) -> str:
        return self.block_table

    @property
    def rows_of_page(self) -> int:
        return self.page

    @property
    def page_param(self) -> str:
        return self.param


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged(Kind):
    """Sequences packed end to end; rows of sequence b are `cu_seqlens[b] .. cu_seqlens[b + 1]`."""

    name: ClassVar[str] = "ragged"
    is_packed: ClassVar[bool] = True
    cu_seqlens: str

    @property
    def ends(self) -> str:
        return self.cu_seqlens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix(Kind):
    """The first columns of another input: no memory of its own, and no gradient but what it adds to that
    input's. joins: of the keys as products have them, scaled and with the columns that `cat` puts behind.
    """

    name: ClassVar[str] = "prefix"
    is_part: ClassVar[bool] = True
    of: str
    joins: bool = False


Storage: TypeAlias = Dense | Paged | Ragged | Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named input or output.

    `shape` is one integer Expr per axis (Dims, Params, constants). For q, k, v, o and lse `roles` names each
    axis; a batch axis may be missing (ragged). Other inputs have no roles: they are addressed by the
    expressions that load them. `dtype` is the name of a param until `variants` fixes it. is_sorted,
    is_distinct: numbers along the last axis ascend; of those that are positions or blocks, no two are equal.
    is_descending: finite numbers of f32 along the last axis never ascend.
    """

    name: str
    dtype: DType | str
    shape: tuple[Expr, ...]
    roles: tuple[Role, ...] = ()
    storage: Storage = Dense()
    is_sorted: bool = False
    is_distinct: bool = False
    is_descending: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)

    def axis(self, role: Role) -> int | None:
        return self.roles.index(role) if role in self.roles else None

    def size(self, role: Role) -> Expr:
        """Returns the size of the axis with this role; ValueError if there is none."""
        return self.shape[self.roles.index(role)]
