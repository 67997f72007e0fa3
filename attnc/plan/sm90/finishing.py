"""How a Hopper forward kernel comes by the rows that its epilogue loads, such as those of a gate.

A row whose columns are loaded in their order is copied ahead where there is room: each warp copies its rows
to the tile through which its rows of o leave, during the first product of the tile of queries. TMA does so
where rows of queries are rows of a box, as they are of `gate[b, q_idx, h, d]`; else lanes do, 16 bytes each.
What the epilogue computes of them alone is computed while the last p v is multiplied, in the registers of
scores, which are free then. Other rows are loaded into registers, two columns at a time; so are all rows of
sums in an absolute order, of which every kernel computes the same, after o is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from attnc.expr.construct import conj
from attnc.expr.nodes import (
    COLUMN,
    And,
    Attended,
    Binary,
    Call,
    Const,
    Dim,
    Expr,
    Index,
    Load,
    Ref,
    children,
    uses,
    walk,
)
from attnc.expr.simplify import substitute
from attnc.model.dtypes import DType
from attnc.plan.epilogue import is_row
from attnc.plan.ir import Decode, Epilogue, Fetch, Forward
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.layout import Sm90Layout

#: The row of a tile of queries, and what all of them share.
_ROW, _OF_HEAD = Index("q_idx"), (Index("b"), Index("h"))
#: Of a tensor map.
_MOST_AXES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A row that is copied ahead. ahead: what is computed of it before o is there, which the value of the
    epilogue, `value`, reads as `name`; in_pairs: sigmoids, of which two share a reciprocal; is_factor: o is
    multiplied by it, so that what divides o by the sum of its row may be multiplied before. rows_axis: the
    axis of the tensor that has the rows of a box which TMA copies; None: lanes copy.
    """

    fetch: Fetch
    name: str
    ahead: Expr
    value: Expr
    rows_axis: int | None = None

    @property
    def beside(self) -> tuple[Expr, ...]:
        """Where a box lies on the axes that have neither its columns nor its rows, from the inside."""
        indices = self.fetch.load.indices[:-1]
        return tuple(x for axis, x in enumerate(indices) if axis != self.rows_axis)[::-1]

    @property
    def is_factor(self) -> bool:
        match self.value:
            case Binary(op="*", left=Ref(name=name), right=Attended()):
                return name == self.name
            case Binary(op="*", left=Attended(), right=Ref(name=name)):
                return name == self.name
        return False

    @property
    def in_pairs(self) -> bool:
        return isinstance(self.ahead, Call) and self.ahead.function == "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing:
    """The rows that an epilogue loads. staged: the one that is copied ahead, None where there is no tile for
    it; paired: those that are loaded two columns at a time.
    """

    staged: Staged | None = None
    paired: tuple[Fetch, ...] = ()


def plan_finishing(kernel: Forward, layout: Sm90Layout, dtypes: Mapping[str, DType]) -> Finishing | None:
    """Returns how the rows of a kernel's epilogue come, None where it loads none."""
    epilogue = kernel.epilogue
    if epilogue is None:
        return None
    rows = tuple(fetch for fetch in epilogue.fetches if is_row(fetch, dtypes[fetch.load.tensor]))
    if not rows:
        return None
    in_order = (
        kernel.segments is not None
    )  # what is computed ahead is rounded otherwise than in decode kernels
    if in_order or any(layout.way_out(config) != "tile" for config in kernel.configs):
        return Finishing(paired=rows)
    boxes = (fetch for fetch in rows if layout.boxes_rows and rows_axis(fetch.load) is not None)
    first = next(boxes, rows[0])
    staged = replace(_stage(epilogue, first), rows_axis=rows_axis(first.load) if layout.boxes_rows else None)
    return Finishing(staged=staged, paired=tuple(fetch for fetch in rows if fetch is not first))


def rows_axis(load: Load) -> int | None:
    """Returns the axis of a tensor with the rows of queries, where a tile of them is a box: they follow each
    other there, and have the same place on all other axes but that of columns. TMA, as a load, gives zeros
    outside of the tensor.
    """
    *others, last = load.indices
    found = [axis for axis, x in enumerate(others) if x == _ROW]
    beside = [node for x in others if x != _ROW for node in walk(x)]
    is_box = len(found) == 1 and len(others) < _MOST_AXES and last == Index(COLUMN)
    is_box &= all(node in _OF_HEAD or isinstance(node, Const | Dim | Binary) for node in beside)
    return found[0] if is_box else None


def pair_rows(kernel: Decode, dtypes: Mapping[str, DType]) -> Finishing:
    """Returns how a decode kernel loads what its epilogue reads: rows of as many columns as o two columns at
    a time, if the row is there. Which columns are of o is known where they are loaded.
    """
    fetches = () if kernel.epilogue is None else kernel.epilogue.fetches
    assert isinstance(kernel.layout, CudaLayout)
    columns = Const(kernel.layout.dv)
    whole = (fetch for fetch in fetches if fetch.load.extents[-1] == columns)
    rows = (replace(x, guard=conj(*_conditions_of_rows(x.guard))) for x in whole)
    return Finishing(paired=tuple(fetch for fetch in rows if is_row(fetch, dtypes[fetch.load.tensor])))


def _conditions_of_rows(guard: Expr) -> Iterator[Expr]:
    conditions = guard.operands if isinstance(guard, And) else (guard,)
    return (condition for condition in conditions if COLUMN not in uses(condition))


def _stage(epilogue: Epilogue, fetch: Fetch) -> Staged:
    element = next(x for x in walk(epilogue.value) if isinstance(x, Ref) and x.name == fetch.name)
    name = f"{fetch.name}_ahead"
    ahead = _widest_of(epilogue.value, element) or element
    known = Ref(name, "float", fetch.axes)
    value = substitute(epilogue.value, {ahead: known})
    if element in walk(value):
        ahead, value = element, substitute(epilogue.value, {element: known})
    return Staged(fetch=fetch, name=name, ahead=ahead, value=value)


def _widest_of(value: Expr, element: Expr) -> Expr | None:
    """Returns the first expression of `element` and numbers alone that is part of no other one."""
    if element in walk(value) and all(x == element or isinstance(x, Const) for x in _leaves(value)):
        return value
    return next((found for x in children(value) if (found := _widest_of(x, element)) is not None), None)


def _leaves(expr: Expr) -> list[Expr]:
    if isinstance(expr, Attended) or not children(expr):
        return [expr]
    return [leaf for child in children(expr) for leaf in _leaves(child)]
