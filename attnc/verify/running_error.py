"""Running error analysis of a score, or an epilogue: how far may float32 lie from the float64 value?

Every node of the expression gets its value and a first-order bound on the absolute error of any sensible
float32 evaluation (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.3). An operation
adds 2u of its value: u for its own rounding and u because a kernel may carry the factor log2(e) through it.
Functions add what their implementations lose (`plan.error_bound.INTRINSICS`) and u for that factor.

What is below the normal numbers may be taken for 0 wherever it turns up: constants, loads, products and
quotients have an error of at most 2^-126 more, which matters to scores that multiply by 10^30 later on. A
quotient may be a product with the reciprocal, and this is infinite for a divisor below 2^-126: nothing is
promised then.

What leaves float32 on the way may become infinite (`Approx.overflows`). That does no harm where something
divides by it or bounds it, as in s / (2 + exp(-s)); where it meets another infinity or 0, nothing is
promised. So the error is infinite where nothing is promised, and NaN nowhere. A value that is infinite or NaN
already in float64 is one in float32 too, and its error is 0, unless the operands leave that in doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from attnc.expr.evaluate import real
from attnc.expr.functions import REAL, RealFunction
from attnc.expr.nodes import And, Attended, Binary, Call, Compare, Const, Dot, Expr, Load, Neg, Not, Or
from attnc.plan.ir import ErrorBound
from attnc.reference import Array, Bools, Floats, Head

#: Unit roundoff of float32.
U = 2.0**-24
#: The least normal float32: GPUs may take smaller numbers for 0.
FLUSHED = 2.0**-126
#: Beyond it a number may overflow float32, with a factor of log2(e) besides.
HUGE = 1e38
#: exp of more is infinite in float32.
_LARGEST_EXPONENT = 89.0


def _nowhere() -> Bools:
    return np.zeros((), np.bool_)


@dataclass(frozen=True, slots=True)
class Approx:
    """A value and a bound on its error. Of a bool, the error is 1 where it could be turned over, else 0.

    overflows: where a float32 evaluation may be infinite in place of a value of the same sign.
    """

    value: Array
    error: Floats
    overflows: Bools = field(default_factory=_nowhere)

    @property
    def size(self) -> Floats:
        return np.abs(self.value)

    @property
    def may_be_infinite(self) -> Bools:
        return np.asarray(self.overflows | np.isinf(self.value))

    @property
    def may_be_zero(self) -> Bools:
        return np.asarray(self.size - self.error < FLUSHED)


@dataclass(frozen=True, slots=True)
class RunningError:
    """The analysis of one head. dot: the inner products, or the attention; intrinsics: relative and absolute
    errors; columns, columns_factor: as a plan states them.
    """

    head: Head
    dot: Approx
    intrinsics: Mapping[str, tuple[float, float]]
    columns: int = 0
    columns_factor: float = 1.0

    @staticmethod
    def of(head: Head, dot: Approx, bound: ErrorBound) -> RunningError:
        intrinsics = {name: (own, absolute) for name, own, absolute in bound.intrinsics}
        return RunningError(head, dot, intrinsics, bound.columns, bound.columns_factor)

    def analyse(self, expr: Expr) -> Approx:
        """Returns the expression's value and error bound, both broadcasting to [M, N]."""
        with np.errstate(all="ignore"):
            return self._analyse(expr)

    def _analyse(self, expr: Expr) -> Approx:
        found = self._approx(expr)
        if expr.type != "float":
            return found
        value = np.asarray(found.value, np.float64)
        error = np.where(np.isnan(value) & ~np.isinf(found.error), 0.0, found.error)
        error = np.where(np.isnan(error), np.inf, error)
        overflows = np.isfinite(value) & (found.overflows | (np.abs(value) + error > HUGE))
        return Approx(value, error, overflows)

    def _approx(self, expr: Expr) -> Approx:
        if isinstance(expr, Dot | Attended):
            return self.dot
        value = self.head.value(expr, self.dot.value)
        match expr:
            case Const() if expr.type == "float":
                single = np.asarray(value.astype(np.float32), np.float64)
                rounded: Floats = np.where(value == single, 0.0, np.abs(value - single))
                return Approx(value, np.asarray(rounded + _underflow_loss(value), np.float64))
            case Load() if expr.type == "float":
                return Approx(value, _underflow_loss(value))
            case Neg(operand=operand):
                inner = self._analyse(operand)
                return Approx(value, inner.error, inner.overflows)
            case Not(operand=operand):
                return Approx(value, self._analyse(operand).error)
            case And(operands=operands) | Or(operands=operands):
                return Approx(value, sum((self._analyse(o).error for o in operands), start=np.zeros(())))
            case Compare(left=left, right=right) if left.type == "bool":
                return Approx(value, np.maximum(self._analyse(left).error, self._analyse(right).error))
            case Compare(left=left, right=right):
                turned = _may_turn(self._float(left), self._float(right))
                return Approx(value, np.where(turned, 1.0, 0.0))
            case Binary() if expr.type == "float":
                # Kernels multiply by the reciprocal of a constant; other quotients are within 2 ulps.
                quotient = 2 * U if isinstance(expr.right, Const) else 5 * U
                a, b = self._float(expr.left), self._float(expr.right)
                found = _binary(expr.op, a, b, value, quotient)
                return self._in_columns(a, b, found) if expr.op in ("+", "-") else found
            case Call(function="where", args=(condition, left, right)) if expr.type == "float":
                takes = self.head.value(condition, self.dot.value)
                turned = self._analyse(condition).error > 0
                return _where(takes, turned, self._float(left), self._float(right), value)
            case Call(function=function, args=args) if expr.type == "float":
                return self._call(function, [self._float(arg) for arg in args], value)
            case _:
                return Approx(value, np.zeros(value.shape))

    def _in_columns(self, a: Approx, b: Approx, found: Approx) -> Approx:
        """Returns a sum that tensor cores may make: its addends are up to six columns, divided by the factor
        of the product, of three numbers each, which lose 2u of the largest of them at each addition
        (`error_bound`).
        """
        if not self.columns:
            return found
        overflows = np.fmax(a.size, b.size) > HUGE * self.columns_factor
        error = found.error + 16 * U * (a.size + b.size)
        return Approx(found.value, error, found.overflows | overflows)

    def _float(self, expr: Expr) -> Approx:
        """Returns an operand as float32: integers are exact up to 2^24. Beyond, and for a tile before that,
        one that grows with the key may be what it is at another key of the tile, and the difference: rounded
        twice.
        """
        inner = self._analyse(expr)
        if expr.type != "int":
            return inner
        value = inner.value.astype(np.float64)
        wide = np.where(np.abs(value) > 2**24 - 512, 2 * U * (np.abs(value) + 512), 0.0)
        return Approx(value, wide + 20 * U * self.columns)

    def _call(self, function: str, args: list[Approx], value: Array) -> Approx:
        x, size = args[0], np.abs(value)
        relative, absolute = self.intrinsics.get(function, (2 * U, 0.0))
        own = (relative + U) * np.where(np.isinf(size), 0.0, size) + absolute
        match function:
            case "abs":
                return Approx(value, x.error, x.overflows)
            case "min" | "max":
                return _extremum(function, x, args[1], value)
            case "exp" | "exp2":
                factor = 1.0 if function == "exp" else np.log(2)
                return _exponential(x.value * factor, x.error * factor, value, own, rounded=function == "exp")
            case "log" | "log2":
                factor = 1.0 if function == "log" else np.log2(np.e)
                carried = _share(factor * x.error, (x.value - x.error).clip(0))
                own = own + (relative + U) * (size < 1)
                return Approx(value, _propagate_positive(x, carried + own), x.overflows)
            case "sqrt":
                carried = _share(x.error, 2 * np.sqrt((x.value - x.error).clip(0)))
                return Approx(value, _propagate_positive(x, carried + own), x.overflows)
            case _ if REAL[function].is_bounded:
                return Approx(value, _propagate_bounded(REAL[function], x, value) + own)
            case _:
                raise ValueError(f"no error analysis of '{function}'")


def _binary(op: str, a: Approx, b: Approx, value: Array, quotient: float) -> Approx:
    size = np.abs(value)
    match op:
        case "+" | "-":
            sign = np.sign(value)
            signs = np.sign(a.value), np.sign(b.value) * (1 if op == "+" else -1)
            # The addends may each be rounded after scaling by log2(e).
            error = a.error + b.error + U * (a.size + b.size) + U * size
            opposed = a.may_be_infinite & b.may_be_infinite & (signs[0] != signs[1])
            turned = (a.overflows & (signs[0] != sign)) | (b.overflows & (signs[1] != sign))
            error = np.where(
                np.isinf(value), a.error * np.isinf(a.value) + b.error * np.isinf(b.value), error
            )
            return Approx(value, np.where(opposed | turned, np.inf, error), a.overflows | b.overflows)
        case "*":
            carried = a.size * b.error + b.size * a.error + a.error * b.error
            error = np.where(np.isinf(value), 0.0, carried + 2 * U * size + _smallest_loss(size))
            vanishes = (a.may_be_infinite & b.may_be_zero) | (b.may_be_infinite & a.may_be_zero)
            return Approx(value, np.where(vanishes, np.inf, error), a.overflows | b.overflows)
        case "/":
            divisor = (b.size - b.error).clip(0)
            error = (
                (a.error + size * b.error) / divisor
                + quotient * size
                + FLUSHED * a.size
                + _smallest_loss(size)
            )
            error = np.where(b.overflows, np.maximum(error, size), error)  # a / inf is 0
            error = np.where(np.isinf(b.value), b.error, np.where(np.isinf(a.value), 0.0, error))
            undefined = (divisor < FLUSHED) | (a.may_be_infinite & b.may_be_infinite)
            return Approx(value, np.where(undefined, np.inf, error), a.overflows)
        case _:
            # Floor division jumps: near a multiple of the divisor it may land one step away.
            steps = a.size / b.size
            doubt = (a.error + steps * b.error) / b.size + U * steps
            jump = np.abs(a.value / b.value - np.round(a.value / b.value)) <= doubt
            if op == "//":
                error = np.where(jump, 1.0, 2 * U * size)
            else:
                error = np.where(jump, b.size, a.error + steps * b.error + 2 * U * (a.size + size))
            return Approx(value, np.where(a.overflows | b.overflows, np.inf, error))


def _exponential(x: Floats, error: Floats, value: Array, own: Floats, *, rounded: bool) -> Approx:
    carried = np.where(error < 1, value * np.expm1(error), np.exp(x + error) - value)
    scaled = np.where(value == 0, 0.0, 2 * U * np.abs(x) * value) if rounded else 0.0
    is_infinite = (error == 0) | (x - error > _LARGEST_EXPONENT)
    total = np.where(np.isinf(value), np.where(is_infinite, 0.0, np.inf), carried + scaled + own + FLUSHED)
    return Approx(
        value, np.where(np.isneginf(x) & (error == 0), 0.0, total), x + error > _LARGEST_EXPONENT - 1
    )


def _propagate_positive(x: Approx, error: Floats) -> Floats:
    """Returns the error of a function of what is not negative; nothing is promised where the sign is in
    doubt.
    """
    doubtful = (x.error > 0) & (x.value - x.error <= 0) & (x.value + x.error >= 0)
    return np.where(doubtful & ~np.isfinite(error), np.inf, np.where(np.isinf(x.value), x.error, error))


def _propagate_bounded(function: RealFunction, x: Approx, value: Array) -> Floats:
    if not function.is_monotonous:  # a slope of 1 at most; of an infinite argument it is no number
        return np.where(x.overflows, np.inf, np.minimum(x.error, function.high - function.low))
    low, high = real(function.name, x.value - x.error), real(function.name, x.value + x.error)
    carried = np.maximum(np.abs(high - value), np.abs(value - low))
    span = function.high - function.low
    carried = np.where(x.error == 0, 0.0, np.where(np.isnan(carried), span, carried))
    if function.name == "sigmoid":  # of exp in 1 / (1 + exp(-x))
        size = np.minimum(x.size, -np.log(FLUSHED))
        carried = carried + value * (1 - value) * (4 * U + 2 * U * size)
    return np.asarray(np.minimum(carried, span))


def _extremum(function: str, a: Approx, b: Approx, value: Array) -> Approx:
    choose = np.minimum if function == "min" else np.maximum
    high, low = choose(a.value + a.error, b.value + b.error), choose(a.value - a.error, b.value - b.error)
    error = np.where(np.isinf(value), 0.0, np.maximum(high - value, value - low))
    overflows = (a.overflows & (value == a.value)) | (b.overflows & (value == b.value))
    return Approx(value, error, overflows)


def _where(takes: Array, turned: Bools, a: Approx, b: Approx, value: Array) -> Approx:
    other = np.maximum(a.error, b.error) + np.where(a.value == b.value, 0.0, np.abs(a.value - b.value))
    chosen = np.where(takes, a.error, b.error)
    overflows = np.where(takes, a.overflows, b.overflows)
    return Approx(
        value,
        np.where(turned, other, chosen),
        np.where(turned, a.overflows | b.overflows, overflows).astype(np.bool_),
    )


def _may_turn(a: Approx, b: Approx) -> Bools:
    spread = a.error + b.error
    near = (spread > 0) & (np.abs(a.value - b.value) <= spread)
    return np.asarray(near | (a.overflows & b.may_be_infinite) | (b.overflows & a.may_be_infinite))


def _underflow_loss(values: Array) -> Floats:
    size = np.abs(values)
    return np.where(size < FLUSHED, size, 0.0)


def _smallest_loss(size: Floats) -> Floats:
    return np.where(size > 0, FLUSHED, 0.0)


def _share(error: Floats, slope: Floats) -> Floats:
    return np.asarray(np.where(error == 0, 0.0, error / slope))


def exponential_error(p: Floats, exponent: Floats, error: Floats) -> Floats:
    """Returns how far exp(exponent +- error) may be from p = exp(exponent), also where p underflows and
    expm1(error) does not.
    """
    return np.where(error < 1, p * np.expm1(error), np.exp(exponent + error) - p)
