"""Lists of blocks of queries, whose kernels' text the tests of targets read."""

from __future__ import annotations

from itertools import product

from attnc.plan.ir import Module
from tests.plan.planning import planned

#: Axes of lists, of which one counts blocks of queries: last, first and in the middle.
AXES = {"B, H, R, S": 2, "R, H, B, S": 0, "B, R, H, S": 1, "R, S": 0}
SIZES = {"B": 2, "H": 3, "R": 4, "S": 5}


def listing(axes: str = "B, H, R, S", *, target: str, count: str = "", dtype: str = "i32") -> Module:
    """The module of an attention over lists with these axes, and with gradients. count: an input's axes."""
    limit = ", count = cnt" if count else ""
    extra = (f"cnt: i32[{count}]",) if count else ()
    mask = f"listed(idx, rows = 128, keys = 128{limit})"
    inputs = (f"idx: {dtype}[{axes}]", *extra)
    return planned(mask, inputs=inputs, target=target, schedule="  stages = 2", grads="q, k, v")


def places(axes: str) -> list[tuple[int, ...]]:
    """The indices of all lists, in the order of their numbers."""
    return list(product(*(range(SIZES[axis]) for axis in axes.split(", ")[:-1])))
