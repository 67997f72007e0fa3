"""Ranges of integers are exact where every value is read once."""

from __future__ import annotations

import random
from itertools import count
from typing import Literal

import numpy as np
import pytest

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.interval import range_of
from attnc.expr.nodes import Binary, Call, Compare, Const, Expr, Neg, Ref


class Draw:
    """Random expressions of values between small bounds, each of them read once."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), count()
        self.within: dict[str, tuple[int, int]] = {}

    def leaf(self) -> Expr:
        if self.random.random() < 0.3:
            return Const(self.random.randint(-4, 4))
        lo = self.random.randint(-4, 4)
        name, within = f"x{next(self.numbers)}", (lo, lo + self.random.randint(0, 4))
        self.within[name] = within
        return Ref(name, "int", within=within)

    def expr(self, depth: int) -> Expr:
        if not depth or len(self.within) > 4:
            return self.leaf()
        size = Const(self.random.randint(1, 5))
        match self.random.randrange(9):
            case 0 | 1 | 2 as at:
                op: Literal["+", "-", "*"] = ("+", "-", "*")[at]
                return Binary(op, self.expr(depth - 1), self.expr(depth - 1))
            case 3:
                return Call(self.random.choice(["min", "max"]), (self.expr(depth - 1), self.expr(depth - 1)))
            case 4:
                return Binary("//", self.expr(depth - 1), size)
            case 5:
                return Neg(self.expr(depth - 1))
            case 6:
                return Call("abs", (self.leaf(),))
            case 7:  # of what stays below the divisor, or passes all remainders
                lo, hi = self.random.choice([(0, 3), (1, 4), (-3, 5)])
                name = f"x{next(self.numbers)}"
                self.within[name] = (lo, hi)
                return Binary("%", Ref(name, "int", within=(lo, hi)), Const(5))
            case _:
                name = f"x{next(self.numbers)}"
                self.within[name] = (0, 1)
                either = Compare("==", Ref(name, "int", within=(0, 1)), Const(0))
                return Call("where", (either, self.expr(depth - 1), self.expr(depth - 1)))


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_exact(seed: int) -> None:
    for number in range(25):
        draw = Draw(1000 * seed + number)
        expr = draw.expr(3)
        values = np.meshgrid(*(np.arange(lo, hi + 1) for lo, hi in draw.within.values()), indexing="ij")
        names = {name: value.ravel() for name, value in zip(draw.within, values, strict=True)}
        found, real = range_of(expr), evaluate(expr, Env(names=names))
        assert (found.lo, found.hi) == (real.min(), real.max()), expr
