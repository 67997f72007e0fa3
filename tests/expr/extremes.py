"""Numbers at the ends of their types, for inputs of masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnc.expr.interval import I64, range_of
from attnc.expr.nodes import Expr, walk
from tests.expr.masks import Case

FAR = np.array([-(2**31), -(2**31) + 1, -(2**30), -7, 0, 5, 2**30 - 1, 2**31 - 1])


def extreme(case: Case, seed: int) -> Case:
    """The case with loaded integers from the ends of i32."""
    rng = np.random.default_rng(seed)
    tensors = dict(case.env.tensors)
    for name in ("kv_len", "prefix", "width", "tag"):
        tensors[name] = rng.choice(FAR, tensors[name].shape)
    tensors["doc"] = np.sort(rng.choice(FAR, tensors["doc"].shape), axis=-1)
    return replace(case, env=replace(case.env, tensors=tensors))


def is_defined(expr: Expr) -> bool:
    """Whether nothing in it may leave 64 bits."""
    return all(range_of(node).is_within(I64) for node in walk(expr) if node.type == "int")
