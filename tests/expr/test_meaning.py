"""What an expression says stays as it is: as it is built, in normal form, and where it is infinite."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from attnc.expr.affine import affine, normalize
from attnc.expr.derive import derive
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.finite import _infinities, is_finite
from attnc.expr.interval import I64, UNKNOWN, bounds, range_of_sum, within_64_bits
from attnc.expr.nodes import (
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    Neg,
    Not,
    Or,
    Ref,
    Search,
    show,
)
from attnc.expr.simplify import simplify, substitute
from tests.expr.masks import COMPARISONS
from tests.expr.spell import spell

#: Values of two indices, three names and a size, all combinations of which are looked at.
_NAMES = {"a": (-3, 0, 1, 4), "c": (-2, 0, 3)}
_KV, _SIZES = (0, 1, 5), (0, 1, 2)
_GRID = [x.ravel() for x in np.meshgrid(*_NAMES.values(), _KV, _SIZES, indexing="ij")]
ENV = Env(
    names=dict(zip(_NAMES, _GRID, strict=False)), indices={"kv_idx": _GRID[-2]}, dims={"N": _GRID[-1]},
    dot=_GRID[0] * 0.75 - 0.5, tensors={},
)  # fmt: skip


class Draw:
    """Random expressions whose leaves are names, positions, sizes and constants that builders know."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def integer(self, depth: int) -> Expr:
        if depth == 0 or self.random.random() < 0.15:
            leaf = self.random.choice((Ref("a", "int"), Ref("c", "int"), Index("kv_idx"), Dim("N"), None))
            return Const(self.random.randint(-3, 4)) if leaf is None else leaf
        made = self.integer(depth - 1)
        match self.random.randrange(9):
            case 0 | 1 | 2 | 3 | 4 as at:
                return Binary(("+", "-", "*", "//", "%")[at], made, self.integer(depth - 1))
            case 5:
                return Neg(made)
            case 6:
                return Call("abs", (made,))
            case 7:
                return Call("where", (self.condition(depth - 1), made, self.integer(depth - 1)))
            case _:
                return Call(self.random.choice(("min", "max")), (made, self.integer(depth - 1)))

    def real(self, depth: int) -> Expr:
        if depth == 0 or self.random.random() < 0.15:
            constants = [Const(value) for value in (0.0, 1.0, -1.0, 2.0, 0.5, math.inf, 3.0)]
            leaf = self.random.choice([None, *constants, None])
            return Dot() if leaf is None else leaf
        made, other = self.real(depth - 1), self.real(depth - 1)
        match self.random.randrange(9):
            case 0 | 1 | 2 | 3 as at:
                return Binary(("+", "-", "*", "/")[at], made, other)
            case 4:
                return Neg(made)
            case 5:
                return Binary("*", self.integer(depth - 1), made)
            case 6:
                return Call("where", (self.condition(depth - 1), made, other))
            case 7:
                return Binary("/", made, Binary("+", Const(1.0), Call("exp", (other,))))
            case _:
                return Call(self.random.choice(("min", "max")), (made, other))

    def condition(self, depth: int) -> Expr:
        op = self.random.choice(COMPARISONS)
        made = Compare(op, self.integer(depth), self.integer(depth))
        match self.random.randrange(4):
            case 0:
                return Not(made)
            case 1:
                return Or((made, Call("bit", (self.integer(0), self.integer(depth)))))
            case _:
                return made


def _are_alike(one: Expr, other: Expr) -> bool:
    """Returns whether they have the same values, of which one may be left where all are the same."""
    found, expected = np.broadcast_arrays(evaluate(one, ENV), evaluate(other, ENV))
    return np.array_equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_integers_keep_their_values(seed: int) -> None:
    """Also where they are divided by sums, by names, by what is negative or 0."""
    draw = Draw(seed)
    for _ in range(80):
        expr = draw.integer(3)
        for made in (simplify(expr), normalize(expr), normalize(simplify(expr))):
            assert made.type == "int"
            assert _are_alike(made, expr), expr


@pytest.mark.parametrize("seed", range(3))
def test_conditions_and_floats_keep_their_values(seed: int) -> None:
    """What divides by 0 as well."""
    draw = Draw(seed)
    for _ in range(60):
        mask = draw.condition(2)
        assert _are_alike(simplify(mask), mask), mask
        expr = draw.real(3)
        made, expected = simplify(expr), evaluate(expr, ENV)
        assert made.type == "float"
        found, expected = np.broadcast_arrays(evaluate(made, ENV), expected)
        there = ~np.isnan(expected)
        np.testing.assert_allclose(found[there], expected[there], rtol=1e-12, atol=1e-12, err_msg=str(expr))


@pytest.mark.parametrize("function", ["min", "max", "+", "-"])
def test_what_may_become_infinite_is_known(function: str) -> None:
    """Of two values that may each be a number, or some infinities: all that pairs of them make."""
    ends = (math.inf, -math.inf)
    sets = [(0.0, *(end for end in ends if chosen & 1 << ends.index(end))) for chosen in range(4)]

    def choice(values: tuple[float, ...]) -> Expr:
        made: Expr = Dot()
        for value in values[1:]:
            made = Call("where", (Compare("<", Index("b"), Const(3)), made, Const(value)))
        return made

    operations: dict[str, Callable[[float, float], float]] = {
        "min": min, "max": max, "+": operator.add, "-": operator.sub
    }  # fmt: skip
    for left, right in product(sets, sets):
        pair = choice(left), choice(right)
        made: Expr = Binary("+", *pair) if function == "+" else Binary("-", *pair)
        if function in ("min", "max"):
            made = Call(function, pair)
        real = {operations[function](x, y) for x, y in product(left, right)}
        found = _infinities(made)
        assert {end for end in found if end == end} == real & {*ends}
        assert any(end != end for end in found) == any(x != x for x in real)
        assert {end for end in _infinities(Neg(made)) if end == end} == {-end for end in real & {*ends}}
    unknown = _infinities(Call("exp", (choice(sets[3]),)))
    assert {math.inf, -math.inf} <= unknown
    assert any(end != end for end in unknown)


@pytest.mark.parametrize(
    ("text", "finite"),
    [
        ("1.0 / kv_idx", False),
        ("2.0 * kv_idx + 1.0", True),
        ("log(kv_idx)", False),
        ("where(kv_idx < 1, 1.0, 1.0 / kv_idx)", False),
        ("min(inf, 1.0 * kv_idx)", False),
        ("slope[h] + 1.0", False),
        ("dot(q, k)", False),
    ],
)
def test_what_is_finite_has_no_way_to_be_infinite(text: str, finite: bool) -> None:
    assert is_finite(spell(text)) == finite


@pytest.mark.parametrize("past", [0, 1, 2, 7, 1023])
def test_a_position_is_so_far_behind_the_last(past: int) -> None:
    """What sizes cancel, they cancel; a search ends at the size."""
    key, row = affine(Index("kv_idx")), affine(Index("q_idx"))
    for position, size in ((key, affine(Dim("N"))), (row, affine(Dim("M")))):
        for c in (1, 2, 5):
            found = range_of_sum((position - size) * c, past)
            assert found.hi == c * (past - 1)
            assert range_of_sum((size - position) * c, past).lo == -found.hi
            assert range_of_sum(position * -c, past).hi == 0
    for heads in ((), (Dim("H"),)):
        rows = (Index("b"), *(Index("h") for _ in heads))
        search = affine(Search("lower", "doc", rows, (Dim("B"), *heads, Dim("N")), Const(3)))
        assert range_of_sum((search - affine(Dim("N"))) * 2, past).hi == 0
        assert range_of_sum(search * -2, past).hi == 0


@pytest.mark.parametrize("c", [-3, -2, -1, 1, 2, 5])
def test_what_is_too_far_counts_as_just_as_far(c: int) -> None:
    """With every number within 64 bits a sum is on the same side of 0."""
    limit, rest = spell("limit[b]"), Ref("a", "int", within=(-8, 6))
    for more in (-3, 0, 2):
        total = affine(limit) * c + affine(rest) + more
        made = within_64_bits(total)
        assert made != total
        assert not range_of_sum(total).is_within(I64)
        assert range_of_sum(made).is_within(I64)
        env = Env(names={"x": np.arange(-40, 41)[:, None], "a": np.arange(-8, 7)})
        far = {limit: Ref("x", "int")}
        told, found = (np.sign(evaluate(substitute(each.expr, far), env)) for each in (total, made))
        assert np.array_equal(told, found)
    assert within_64_bits(affine(limit) * c, besides="b") == affine(limit) * c


def test_bounds_are_known_of_one_side() -> None:
    """Of integers: a float may be no number. Of what is sorted both ends are needed."""
    far, free = spell("abs(limit[b])"), spell("abs(tag[b, kv_idx])")
    assert [bounds(x).lo for x in (far, free)] in ([far, Const(0)], [Const(0), Const(0)])
    assert bounds(spell("abs(bias[h, q_idx, kv_idx])")) == UNKNOWN
    for index in ("max(tag[b, kv_idx], 0)", "min(tag[b, kv_idx], 3)", "tag[b, kv_idx]"):
        assert bounds(spell(f"doc[b, {index}]")) == UNKNOWN
    assert bounds(spell("doc[b, kv_idx]")) != UNKNOWN


@pytest.mark.parametrize(
    ("text", "lo", "hi"),
    [
        ("abs(kv_idx)", "kv_lo", "kv_hi"),
        ("abs(-3 - kv_idx)", "kv_lo + 3", "kv_hi + 3"),
        ("max(kv_idx, N)", "N", "N"),
        ("min(kv_idx, N)", "kv_lo", "kv_hi"),
        ("max(kv_idx, kv_idx + 1)", "kv_lo + 1", "kv_hi + 1"),
        ("min(q_idx, q_idx - 2)", "q_lo - 2", "q_hi - 2"),
        ("max(kv_idx, 3)", "max(kv_lo, 3)", "max(kv_hi, 3)"),
        ("min(kv_idx, 3)", "min(kv_lo, 3)", "min(kv_hi, 3)"),
    ],
)
def test_bounds_leave_out_what_is_known_to_be_no_end(text: str, lo: str, hi: str) -> None:
    found = bounds(spell(text))
    assert [end and show(normalize(end)) for end in (found.lo, found.hi)] == [lo, hi]


def test_a_load_has_a_gradient_if_it_is_a_float_and_something_reaches_it() -> None:
    for text, expected in (
        ("dot(q, k) + bias[h, q_idx, kv_idx]", {"bias"}),
        ("dot(q, k) + tag[b, kv_idx] * slope[h]", {"slope"}),
        ("dot(q, k) + tag[b, kv_idx]", set()),
        ("dot(q, k) + 0.0 * (slope[h] // 1.0) + bias[h, q_idx, kv_idx] // 1.0", set()),
        ("where(tag[b, kv_idx] < 3, dot(q, k), slope[h])", {"slope"}),
    ):
        loads = dict(derive(spell(text)).loads)
        assert {load.tensor for load in loads} == expected
        assert Const(0.0) not in loads.values()
