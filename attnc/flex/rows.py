"""Rows of captured tensors: what makes one number of several."""

from __future__ import annotations

from typing import Any

from attnc.flex.arithmetic import add, div, maximum, minimum, mul
from attnc.flex.errors import refused
from attnc.flex.logic import logical_and, logical_or
from attnc.flex.operations import Operation, operation
from attnc.flex.symbols import OPERATIONS, Indexed, Vector, scalar
from attnc.flex.tape import Tape


def _row(tape: Tape, x: Any) -> Vector:
    if isinstance(x, Indexed):
        return x.vector
    if isinstance(x, Vector):
        return x
    return Vector(tape, [scalar(tape, x)])


def _reduction(names: tuple[str, ...], combine: Operation) -> None:
    def reduce(tape: Tape, x: Any, *_: Any, **__: Any) -> Any:
        elements = _row(tape, x).elements
        result = elements[0]
        for element in elements[1:]:
            result = combine(tape, result, element)
        return result

    operation(*names, takes_rows=True)(reduce)


_reduction(("sum",), add)
_reduction(("prod",), mul)
_reduction(("amax",), maximum)
_reduction(("amin",), minimum)
_reduction(("any",), logical_or)
_reduction(("all",), logical_and)


@operation("mean", takes_rows=True)
def mean(tape: Tape, x: Any, *_: Any, **__: Any) -> Any:
    return div(tape, OPERATIONS["sum"](tape, x), len(_row(tape, x).elements))


@operation("dot", "inner", "vdot", takes_rows=True)
def dot(tape: Tape, x: Any, y: Any) -> Any:
    rows = _row(tape, x).elements, _row(tape, y).elements
    if len(rows[0]) != len(rows[1]):
        raise refused("E0903", f"rows of {len(rows[0])} and {len(rows[1])} elements", "lengths differ")
    products = [mul(tape, a, b) for a, b in zip(*rows, strict=True)]
    return OPERATIONS["sum"](tape, Vector(tape, products))


@operation("__getitem__", "getitem", takes_rows=True)
def getitem(tape: Tape, x: Any, index: Any) -> Any:
    return x[index]


@operation("index", "select", "gather", "index_select", "take", takes_rows=True)
def looked_up(tape: Tape, x: Any, *_: Any, **__: Any) -> Any:
    raise refused(
        "E0901", "a lookup by name", "written with brackets in mods", "write tensor[b, h, q_idx, kv_idx]"
    )
