"""Corners of the element-by-element semantics."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.functions import REAL
from attnc.expr.nodes import Binary, Call, Const, Dim, Dot, Index, InList, Load, Search, show
from tests.expr.spell import spell

ENV = Env(
    indices={"b": 0, "h": 0, "q_idx": np.arange(4)[:, None], "kv_idx": np.arange(3)},
    dims={"B": 1, "H": 1, "M": 4, "N": 3},
    tensors={
        "doc": np.array([[3, 5, 5]]),
        "keep": np.array([[True, False, True]]),
        "slope": np.array([0.5]),
    },
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("q_pos", [[-1], [0], [1], [2]]),
        ("(kv_idx - 1) // 2", [-1, 0, 0]),
        ("(kv_idx - 1) % 2", [1, 0, 1]),
        ("kv_idx // 0 + kv_idx % 0", [0, 0, 0]),
        ("kv_idx / 2", [0.0, 0.5, 1.0]),
        ("doc[b, q_pos]", [[0], [3], [5], [5]]),
        ("doc[b, kv_idx + 1]", [5, 5, 0]),
        ("doc[b - 1, kv_idx]", [0, 0, 0]),
        ("not keep[b, kv_idx]", [False, True, False]),
        ("where(kv_idx < 1, slope[h], kv_idx)", [0.5, 1.0, 2.0]),
        ("kv_idx == q_pos and true or false", np.eye(4, 3, -1, dtype=bool)),
    ],
)
def test_values(text: str, values: object) -> None:
    result = evaluate(spell(text), ENV)
    np.testing.assert_array_equal(result, np.asarray(values), strict=True)


def test_dot_and_float_functions() -> None:
    env = Env(dot=np.array([0.25, 4.0]))
    expr = spell("tanh(dot(q, k)) + sqrt(dot(q, k)) * exp(log(dot(q, k))) + max(dot(q, k), 1)")
    dot = np.array([0.25, 4.0])
    np.testing.assert_allclose(evaluate(expr, env), np.tanh(dot) + dot**1.5 + np.maximum(dot, 1))
    with pytest.raises(KeyError, match="dot"):
        evaluate(expr, Env())


#: What operations on integers mean, by Python's.
_OF_INTEGERS: dict[str, Callable[[int, int], object]] = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y if y else None,
    "x // y": lambda x, y: x // y if y else 0,
    "x % y": lambda x, y: x % y if y else 0,
    "-x": lambda x, y: -x,
    "abs(x)": lambda x, y: abs(x),
    "min(x, y)": min,
    "max(x, y)": max,
    "where(x > y, x, y - 1)": lambda x, y: x if x > y else y - 1,
    "x == y": lambda x, y: x == y,
    "x != y": lambda x, y: x != y,
    "x < y": lambda x, y: x < y,
    "x <= y": lambda x, y: x <= y,
    "x > y": lambda x, y: x > y,
    "x >= y": lambda x, y: x >= y,
    "x > 0 and y > 0 and x != y": lambda x, y: x > 0 and y > 0 and x != y,
    "x > 2 or y > 2 or x == y": lambda x, y: x > 2 or y > 2 or x == y,
    "not x < y": lambda x, y: x >= y,
    "bit(x, y)": lambda x, y: 0 <= y < 64 and bool(x >> y & 1),
}


@pytest.mark.parametrize("text", _OF_INTEGERS)
def test_operations_on_integers_are_those_of_python(text: str) -> None:
    integers = (-9, -8, -5, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 31, 32, 63, 64, 1 << 31)
    x, y = (found.ravel() for found in np.meshgrid(integers, integers))
    spelled = re.sub(r"\b([xy])\b", lambda found: {"x": "q_idx", "y": "kv_idx"}[found[0]], text)
    values = evaluate(spell(spelled), Env(indices={"q_idx": x, "kv_idx": y})).tolist()
    for ours, *given in zip(values, x.tolist(), y.tolist(), strict=True):
        expected = _OF_INTEGERS[text](*given)
        assert expected is None or (ours, type(ours)) == (expected, type(expected)), given


@pytest.mark.parametrize("name", sorted(REAL))
def test_functions_are_those_of_torch(name: str) -> None:
    x = np.array([-30.0, -1.5, -0.0, 0.0, 0.25, 1.0, 30.0])
    found = evaluate(Call(name, (Dot(),)), Env(dot=x))
    by_name = {"sigmoid": torch.sigmoid, "erf": torch.erf}.get(name) or getattr(torch, name)
    np.testing.assert_allclose(found, by_name(torch.from_numpy(x)).numpy(), rtol=1e-12)


def test_search_is_searchsorted_and_counts_zeros_outside() -> None:
    def search(side: Literal["lower", "upper"], value: str, batch: str = "b") -> int:
        node = Search(side, "doc", (spell(batch),), (Dim("B"), Dim("N")), spell(value))
        return int(evaluate(node, ENV))

    for value in range(2, 7):
        assert search("lower", str(value)) == np.searchsorted([3, 5, 5], value, "left")
        assert search("upper", str(value)) == np.searchsorted([3, 5, 5], value, "right")
    assert search("lower", "1", "b + 1") == 3
    assert search("lower", "0", "b + 1") == 0


@pytest.mark.parametrize("shapes", list(product(((), (3, 1), (2,)), repeat=3)), ids=str)
def test_a_search_of_many_rows_is_that_of_each(shapes: tuple[tuple[int, ...], ...]) -> None:
    chance = np.random.default_rng(0)
    rows = np.sort(chance.integers(0, 9, (3, 7)), axis=1)
    names = ("h", "q_idx", "kv_idx")  # the row, how many of its elements, and what is looked for
    ends = (3, 8, 10)
    values = [chance.integers(0, end, shape) for end, shape in zip(ends, shapes, strict=True)]
    row, length, value = (Index(name) for name in names)
    search = Search("lower", "rows", (row,), (Dim("H"), Dim("N")), value, limit=length)
    dims, tensors = {"H": 3, "N": 7}, {"rows": rows}
    found = evaluate(search, Env(indices=dict(zip(names, values, strict=True)), dims=dims, tensors=tensors))
    each = np.nditer(np.broadcast_arrays(*values), flags=["zerosize_ok"])
    wanted = [int(np.searchsorted(rows[int(h)][: int(n)], x)) for h, n, x in each]
    np.testing.assert_array_equal(np.ravel(np.broadcast_to(found, np.broadcast_shapes(*shapes))), wanted)


def test_an_empty_tensor_reads_zero() -> None:
    env = Env(
        indices={"b": 0, "kv_idx": np.arange(2)}, dims={"B": 1, "N": 0}, tensors={"doc": np.zeros((1, 0))}
    )
    np.testing.assert_array_equal(evaluate(spell("doc[b, kv_idx]"), env), [0, 0])


def test_listed_looks_for_the_block_of_the_key() -> None:
    lists = np.array([[0, -1, 0], [7, 1, 2**31 - 1]])
    query = Binary("//", Index("q_idx"), Const(2))
    entry = Binary("//", Index("kv_idx"), Const(2))
    at = {"q_idx": np.arange(6)[:, None], "kv_idx": np.arange(5)[None]}
    env = Env(indices=at, dims={"R": 2, "S": 3}, tensors={"idx": lists, "count": np.array([3, 1])})
    listed = InList("idx", (query,), (Dim("R"), Dim("S")), entry)
    assert evaluate(listed, env).astype(int).tolist() == [
        *[[1, 1, 0, 0, 0]] * 2,  # two entries of block 0 are as one, and -1 is none
        *[[0, 0, 1, 1, 0]] * 2,
        *[[0, 0, 0, 0, 0]] * 2,  # of the third block of queries there is no list
    ]
    counted = replace(listed, limit=Load("count", (query,), (Dim("R"),), "int"))
    assert not evaluate(counted, env)[2:].any()
    assert show(counted) == "listed(idx[q_idx // 2], keys = 2, count = count[q_idx // 2])"


@pytest.mark.parametrize("descends", [False, True])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_the_axis_that_is_looked_at_is_the_last_of_any(
    side: Literal["lower", "upper"], descends: bool
) -> None:
    """Of lists and of searches, whatever lies in front of it, and wherever a row ends."""
    chance = np.random.default_rng(1)
    rows = np.sort(chance.integers(0, 9, (2, 3, 5)), axis=-1)
    axes, extents = (Index("b"), Index("h")), (Dim("B"), Dim("H"), Dim("N"))
    at = {"b": np.arange(-1, 3)[:, None, None], "h": np.arange(-1, 4)[:, None], "kv_idx": np.arange(-2, 11)}
    given = rows[..., ::-1] if descends else rows
    env = Env(indices=at, dims={"B": 2, "H": 3, "N": 5}, tensors={"rows": given})
    search = Search(side, "rows", axes, extents, Index("kv_idx"), descends=descends)
    listed = InList("rows", axes, extents, Index("kv_idx"))
    places, named_there = evaluate(search, env), evaluate(listed, env)
    outside = np.zeros(5, np.int64)
    for b, h in product(range(-1, 3), range(-1, 4)):
        row = rows[b, h] if b in range(2) and h in range(3) else outside
        named = set(row) if row is not outside else set()
        for value in range(-2, 11):
            place = b + 1, h + 1, value + 2
            assert named_there[place] == (value in named)
            other: Literal["left", "right"] = "right" if (side == "upper") != descends else "left"
            before = int(np.searchsorted(row, value, other))
            assert places[place] == (len(row) - before if descends else before)
