"""Running error analysis of a score: how far may a float32 evaluation lie from the float64 value?

Every node of the expression gets its value and a first-order bound on the absolute error of any sensible
float32 evaluation (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.3). An operation
adds 2u of its value: u for its own rounding and u because a kernel may carry the factor log2(e) through it.

What is below the normal numbers may be taken for 0 wherever it turns up: constants, loads, products and
quotients have an error of at most 2^-126 more, which matters to scores that multiply by 10^30 later on. A
quotient may be a product with the reciprocal, and this is infinite for a divisor below 2^-126: nothing is
promised then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attnc.expr.nodes import And, Binary, Call, Compare, Const, Dot, Expr, Load, Neg, Not, Or
from attnc.reference import Head
from attnc.reference_arrays import Array, Floats

#: Unit roundoff of float32.
U = 2.0**-24
#: The least normal float32: GPUs may take smaller numbers for 0.
FLUSHED = 2.0**-126


@dataclass(frozen=True, slots=True)
class Approx:
    """A value and a bound on its error. Of a bool, the error is 1 where it could be turned over, else 0."""

    value: Array
    error: Floats


@dataclass(frozen=True, slots=True)
class RunningError:
    """The analysis of one head. `dot`: the inner products; `intrinsics`: their absolute errors."""

    head: Head
    dot: Approx
    intrinsics: Mapping[str, float]

    def analyse(self, expr: Expr) -> Approx:
        """The expression's value and error bound, both broadcasting to [M, N]."""
        with np.errstate(all="ignore"):
            return self._analyse(expr)

    def _analyse(self, expr: Expr) -> Approx:
        if isinstance(expr, Dot):
            return self.dot
        value = self.head.value(expr, self.dot.value)
        match expr:
            case Const() if expr.type == "float":
                return Approx(
                    value, np.abs(value - value.astype(np.float32).astype(np.float64)) + _flushed(value)
                )
            case Load() if expr.type == "float":
                return Approx(value, _flushed(value))
            case Neg(operand=operand):
                return Approx(value, self._analyse(operand).error)
            case Not(operand=operand):
                return Approx(value, self._analyse(operand).error)
            case And(operands=operands) | Or(operands=operands):
                return Approx(value, sum((self._analyse(o).error for o in operands), start=np.zeros(())))
            case Compare(left=left, right=right):
                a, b = self._float(left), self._float(right)
                spread = a.error + b.error
                return Approx(value, ((spread > 0) & (np.abs(a.value - b.value) <= spread)) * 1.0)
            case Binary() if expr.type == "float":
                return Approx(value, self._binary(expr, np.abs(value)))
            case Call(function="where", args=(condition, left, right)) if expr.type == "float":
                a, b, turned = self._float(left), self._float(right), self._analyse(condition).error > 0
                other = np.maximum(a.error, b.error) + np.abs(a.value - b.value)
                chosen = np.where(self.head.value(condition, self.dot.value), a.error, b.error)
                return Approx(value, np.where(turned, other, chosen))
            case Call(function=function, args=args) if expr.type == "float":
                error = self._call(function, [self._float(arg) for arg in args], value)
                return Approx(value, error + self.intrinsics.get(function, 0.0))
            case _:
                return Approx(value, np.zeros(value.shape))

    def _float(self, expr: Expr) -> Approx:
        """An operand as float32: integers are exact up to 2^24."""
        inner = self._analyse(expr)
        if expr.type != "int":
            return inner
        value = inner.value.astype(np.float64)
        return Approx(value, np.where(np.abs(value) > 2**24, U * np.abs(value), 0.0))

    def _binary(self, expr: Binary, size: Floats) -> Floats:
        a, b = self._float(expr.left), self._float(expr.right)
        abs_a, abs_b = np.abs(a.value), np.abs(b.value)
        match expr.op:
            case "+" | "-":
                # The addends may each be rounded after scaling by log2(e).
                return np.asarray(a.error + b.error + U * (abs_a + abs_b) + U * size)
            case "*":
                carried = abs_a * b.error + abs_b * a.error + a.error * b.error
                return np.asarray(carried + 2 * U * size + _least(size))
            case "/":
                divisor = (abs_b - b.error).clip(0)
                error = (a.error + size * b.error) / divisor + 2 * U * size + FLUSHED * abs_a + _least(size)
                return np.where(divisor < FLUSHED, np.inf, error)
            case _:
                # Floor division jumps: near a multiple of the divisor it may land one step away.
                quotient = abs_a / abs_b
                doubt = (a.error + quotient * b.error) / abs_b + U * quotient
                jump = np.abs(a.value / b.value - np.round(a.value / b.value)) <= doubt
                if expr.op == "//":
                    return np.where(jump, 1.0, 2 * U * size)
                return np.where(jump, abs_b, a.error + quotient * b.error + 2 * U * (abs_a + size))

    def _call(self, function: str, args: list[Approx], value: Array) -> Floats:
        x, size, own = args[0], np.abs(value), 2 * U
        match function:
            case "abs":
                return x.error
            case "min" | "max":
                return np.maximum(x.error, args[1].error)
            case "exp":
                return np.asarray(size * np.expm1(x.error) + (own + 2 * U * np.abs(x.value)) * size)
            case "log":
                return np.asarray(_share(x.error, (x.value - x.error).clip(0)) + own * np.maximum(size, 1.0))
            case "sqrt":
                return np.asarray(_share(x.error, 2 * np.sqrt((x.value - x.error).clip(0))) + own * size)
            case "tanh":
                nearest = (np.abs(x.value) - x.error).clip(0)
                return np.asarray(x.error / np.cosh(nearest) ** 2 + own * size)
            case _:
                raise ValueError(f"no error analysis of '{function}'")


def _flushed(values: Array) -> Floats:
    """What is lost if numbers below the normal ones are taken for 0."""
    size = np.abs(values)
    return np.where(size < FLUSHED, size, 0.0)


def _least(size: Floats) -> Floats:
    """What a result may lose that is not known to be 0."""
    return np.where(size > 0, FLUSHED, 0.0)


def _share(error: Floats, slope: Floats) -> Floats:
    """error / slope; an exact value stays exact where the slope is infinite."""
    return np.asarray(np.where(error == 0, 0.0, error / slope))
