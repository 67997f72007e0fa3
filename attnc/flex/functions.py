"""torch's functions of one number, those of neural networks, and of rows of captured tensors: all that
`operations` has no arithmetic for.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attnc.expr.functions import REAL
from attnc.flex.errors import refuse
from attnc.flex.operations import (
    Operation,
    absolute,
    add,
    clamp,
    compare,
    div,
    integer,
    logical_and,
    logical_or,
    maximum,
    minimum,
    mul,
    neg,
    number,
    operation,
    real,
    sub,
    where,
)
from attnc.flex.symbols import OPERATIONS, Indexed, Scalar, Vector, scalar
from attnc.flex.tape import Tape

# --- functions of one number --------------------------------------------------------------------------------


def function(tape: Tape, name: str, x: Any) -> Scalar:
    """Returns an intrinsic of the language."""
    return Scalar(tape, tape.add("float", "call", name, number(tape, x).at))


for _name, _intrinsic in {
    **{name: name for name in REAL}, "special_exp2": "exp2", "special_expit": "sigmoid", "special_erf": "erf",
}.items():  # fmt: skip
    OPERATIONS[_name] = lambda tape, x, _name=_intrinsic: function(tape, _name, x)


@operation("log10")
def log10(tape: Tape, x: Any) -> Scalar:
    return mul(tape, function(tape, "log", x), 1 / math.log(10))


@operation("log1p", "special_log1p")
def log1p(tape: Tape, x: Any) -> Scalar:
    return function(tape, "log", add(tape, x, 1.0))


@operation("expm1", "special_expm1")
def expm1(tape: Tape, x: Any) -> Scalar:
    return sub(tape, function(tape, "exp", x), 1.0)


@operation("rsqrt")
def rsqrt(tape: Tape, x: Any) -> Scalar:
    return div(tape, 1.0, function(tape, "sqrt", x))


@operation("reciprocal")
def reciprocal(tape: Tape, x: Any) -> Scalar:
    return div(tape, 1.0, x)


@operation("erfc", "special_erfc")
def erfc(tape: Tape, x: Any) -> Scalar:
    return sub(tape, 1.0, function(tape, "erf", x))


@operation("logsigmoid", "log_sigmoid")
def logsigmoid(tape: Tape, x: Any) -> Scalar:
    return neg(tape, softplus(tape, neg(tape, x)))


@operation("softplus")
def softplus(tape: Tape, x: Any, beta: Any = 1, threshold: Any = 20) -> Scalar:
    """Computes log(1 + exp(x)). In a tie at 0 derivatives are those of first operands, 0 and 1."""
    scaled = x if beta == 1 else mul(tape, beta, x)
    inner = function(tape, "exp", minimum(tape, scaled, neg(tape, scaled)))
    found = add(tape, maximum(tape, 0.0, scaled), log1p(tape, inner))
    return found if beta == 1 else div(tape, found, beta)


@operation("logaddexp")
def logaddexp(tape: Tape, x: Any, y: Any) -> Scalar:
    return _log_of_sum(tape, x, y, "exp", "log")


@operation("logaddexp2")
def logaddexp2(tape: Tape, x: Any, y: Any) -> Scalar:
    return _log_of_sum(tape, x, y, "exp2", "log2")


def _log_of_sum(tape: Tape, x: Any, y: Any, power: str, logarithm: str) -> Scalar:
    """Computes log(exp(x) + exp(y)) from the larger one; of equal numbers, infinite ones too, from the mean,
    whose derivatives are torch's.
    """
    a, b = real(tape, x), real(tape, y)
    are_equal = compare(tape, "==", a, b)
    larger, smaller = maximum(tape, a, b), minimum(tape, a, b)
    below = where(tape, are_equal, 0.0, sub(tape, smaller, larger))
    more = function(tape, logarithm, add(tape, 1.0, function(tape, power, below)))
    return add(tape, where(tape, are_equal, mul(tape, 0.5, add(tape, a, b)), larger), more)


@operation("silu")
def silu(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return mul(tape, x, function(tape, "sigmoid", x))


@operation("relu")
def relu(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return maximum(tape, 0, x)  # whose derivative at 0 is that of the first


@operation("leaky_relu")
def leaky_relu(tape: Tape, x: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Scalar:
    return where(tape, compare(tape, ">", x, 0), x, mul(tape, x, negative_slope))


@operation("elu")
def elu(tape: Tape, x: Any, alpha: Any = 1.0, inplace: bool = False) -> Scalar:
    below = mul(tape, alpha, expm1(tape, minimum(tape, x, 0.0)))
    return where(tape, compare(tape, ">", x, 0), x, below)


@operation("gelu")
def gelu(tape: Tape, x: Any, *, approximate: str = "none") -> Scalar:
    if approximate == "none":
        exact = function(tape, "erf", mul(tape, math.sqrt(0.5), x))
        return mul(tape, mul(tape, 0.5, x), add(tape, 1.0, exact))
    cubic = mul(tape, 0.044715, _power(tape, x, 3))
    inner = mul(tape, math.sqrt(2 / math.pi), add(tape, x, cubic))
    return mul(tape, mul(tape, 0.5, x), add(tape, 1.0, function(tape, "tanh", inner)))


# --- functions that clip: at their ends derivatives are those of the first of two equal operands ------------


@operation("hardtanh")
def hardtanh(tape: Tape, x: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Scalar:
    return minimum(tape, max_val, maximum(tape, min_val, real(tape, x)))


@operation("relu6")
def relu6(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return hardtanh(tape, x, 0.0, 6.0)


@operation("hardsigmoid")
def hardsigmoid(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return add(tape, div(tape, hardtanh(tape, x, -3.0, 3.0), 6), 0.5)


@operation("hardswish")
def hardswish(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return mul(tape, x, hardsigmoid(tape, x))


@operation("hardshrink")
def hardshrink(tape: Tape, x: Any, lambd: Any = 0.5) -> Scalar:
    return where(tape, compare(tape, "<=", absolute(tape, x), lambd), 0.0, x)


@operation("softshrink")
def softshrink(tape: Tape, x: Any, lambd: Any = 0.5) -> Scalar:
    return sub(tape, x, clamp(tape, x, neg(tape, lambd), lambd))


@operation("threshold", "_threshold")
def threshold(tape: Tape, x: Any, threshold: Any, value: Any, inplace: bool = False) -> Scalar:
    return where(tape, compare(tape, "<=", x, threshold), value, x)


@operation("celu")
def celu(tape: Tape, x: Any, alpha: Any = 1.0, inplace: bool = False) -> Scalar:
    below = mul(tape, alpha, expm1(tape, div(tape, minimum(tape, x, 0.0), alpha)))
    return where(tape, compare(tape, ">", x, 0), x, below)


@operation("selu")
def selu(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return mul(tape, 1.0507009873554805, elu(tape, x, 1.6732632423543772))


@operation("mish")
def mish(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return mul(tape, x, function(tape, "tanh", softplus(tape, x)))


@operation("softsign")
def softsign(tape: Tape, x: Any) -> Scalar:
    return div(tape, x, add(tape, 1.0, absolute(tape, x)))


@operation("tanhshrink")
def tanhshrink(tape: Tape, x: Any) -> Scalar:
    return sub(tape, x, function(tape, "tanh", x))


@operation("hypot")
def hypot(tape: Tape, x: Any, y: Any) -> Scalar:
    return function(tape, "sqrt", add(tape, mul(tape, x, x), mul(tape, y, y)))


# --- infinities, and what is no number ----------------------------------------------------------------------


@operation("isnan")
def is_nan(tape: Tape, x: Any) -> Scalar:
    found = real(tape, x)
    return compare(tape, "!=", found, found)


@operation("isinf")
def is_infinite(tape: Tape, x: Any) -> Scalar:
    return compare(tape, "==", absolute(tape, real(tape, x)), math.inf)


@operation("isfinite")
def is_finite(tape: Tape, x: Any) -> Scalar:
    return compare(tape, "<", absolute(tape, real(tape, x)), math.inf)


@operation("isposinf")
def is_plus_infinity(tape: Tape, x: Any) -> Scalar:
    return compare(tape, "==", real(tape, x), math.inf)


@operation("isneginf")
def is_minus_infinity(tape: Tape, x: Any) -> Scalar:
    return compare(tape, "==", real(tape, x), -math.inf)


@operation("nan_to_num")
def nan_to_num(tape: Tape, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Scalar:
    """Replaces infinities by these or the largest numbers of float32, as which scores are computed."""
    found, most = real(tape, x), torch.finfo(torch.float32).max
    found = where(tape, is_plus_infinity(tape, found), most if posinf is None else posinf, found)
    found = where(tape, is_minus_infinity(tape, found), -most if neginf is None else neginf, found)
    return where(tape, is_nan(tape, x), 0.0 if nan is None else nan, found)


# --- hyperbolic ones, signs and powers ----------------------------------------------------------------------


@operation("cosh")
def cosh(tape: Tape, x: Any) -> Scalar:
    return mul(tape, 0.5, add(tape, function(tape, "exp", x), function(tape, "exp", neg(tape, x))))


@operation("sinh")
def sinh(tape: Tape, x: Any) -> Scalar:
    return mul(tape, 0.5, sub(tape, function(tape, "exp", x), function(tape, "exp", neg(tape, x))))


@operation("tan")
def tan(tape: Tape, x: Any) -> Scalar:
    return div(tape, function(tape, "sin", x), function(tape, "cos", x))


@operation("sign", "sgn")
def sign(tape: Tape, x: Any) -> Scalar:
    positive = where(tape, compare(tape, ">", x, 0), integer(tape, 1), integer(tape, 0))
    return where(tape, compare(tape, "<", x, 0), integer(tape, -1), positive)


@operation("pow", "float_power")
def power(tape: Tape, x: Any, exponent: Any) -> Scalar:
    """Raises to whole and half powers; the exponent is part of the structure. Powers of a positive number, by
    exp.
    """
    if isinstance(exponent, int | float) and abs(exponent) <= 8 and (2 * exponent) % 1 == 0:
        return _power(tape, x, exponent)
    if isinstance(x, int | float) and x == 2:
        return function(tape, "exp2", exponent)
    if isinstance(x, int | float) and x > 0:
        return function(tape, "exp", mul(tape, exponent, math.log(x)))
    raise refuse("E0901", "'pow' with this exponent", "specs multiply: exponents are -8 to 8 in steps of 1/2")


def _power(tape: Tape, x: Any, exponent: float) -> Scalar:
    if exponent < 0:
        return div(tape, 1, _power(tape, x, -exponent))
    base = number(tape, x)
    if exponent <= 1 or exponent == int(exponent):
        return _multiply(tape, base, exponent)
    is_zero = compare(tape, "==", base, 0)  # where the root has no slope, but the power has one: 0
    power = _multiply(tape, where(tape, is_zero, 1.0, base), exponent)
    return where(tape, is_zero, 0.0, power)


def _multiply(tape: Tape, base: Scalar, exponent: float) -> Scalar:
    result = None
    for _ in range(int(exponent)):
        result = base if result is None else mul(tape, result, base)
    if exponent != int(exponent):
        root = function(tape, "sqrt", base)
        result = root if result is None else mul(tape, result, root)
    return real(tape, 1) if result is None else result


# --- rows of captured tensors -------------------------------------------------------------------------------


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


def _combine_elements(combine: Operation) -> Operation:
    return lambda tape, x, y: combine(tape, _wide(tape, x), _wide(tape, y))


def _wide(tape: Tape, x: Any) -> Scalar:
    found = number(tape, x)
    return Scalar(tape, found.at, found.low, found.high)


_reduction(("sum",), _combine_elements(add))
_reduction(("prod",), _combine_elements(mul))
_reduction(("amax",), maximum)
_reduction(("amin",), minimum)
_reduction(("any",), logical_or)
_reduction(("all",), logical_and)


@operation("mean", takes_rows=True)
def mean(tape: Tape, x: Any, *_: Any, **__: Any) -> Any:
    return div(tape, OPERATIONS["sum"](tape, x), len(_row(tape, x).elements))


@operation("dot", "inner", "vdot", takes_rows=True)
def dot(tape: Tape, x: Any, tensor: Any) -> Any:
    rows = _row(tape, x).elements, _row(tape, tensor).elements
    if len(rows[0]) != len(rows[1]):
        raise refuse("E0903", f"rows of {len(rows[0])} and {len(rows[1])} elements", "lengths differ")
    products = [mul(tape, a, b) for a, b in zip(*rows, strict=True)]
    return OPERATIONS["sum"](tape, Vector(tape, products))


def _whole(tape: Tape, tensor: Any) -> Vector:
    """Returns a captured tensor of one axis as a row."""
    is_whole = isinstance(tensor, torch.Tensor) and tensor.dim() == 1
    return _row(tape, Indexed(tape, tensor, ()) if is_whole else tensor)


def _compare_with_each(tape: Tape, symbol: str, row: Any, x: Any) -> Vector:
    found: list[Any] = [compare(tape, symbol, each, x) for each in _whole(tape, row).elements]
    return Vector(tape, found or [scalar(tape, False)])


@operation("isin", takes_rows=True)
def is_in(
    tape: Tape, elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Returns whether a number is one of a few."""
    found = OPERATIONS["any"](tape, _compare_with_each(tape, "==", test_elements, elements))
    return OPERATIONS["logical_not"](tape, found) if invert else found


@operation("bucketize", takes_rows=True)
def bucketize(
    tape: Tape, input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    """Returns how many of a few ascending numbers are below a number, or not above it if `right`."""
    return OPERATIONS["sum"](tape, _compare_with_each(tape, "<=" if right else "<", boundaries, input))


@operation("searchsorted", takes_rows=True)
def search_sorted(
    tape: Tape,
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Any:
    return bucketize(tape, input, sorted_sequence, right=right or side == "right")


@operation("index", "select", "gather", "index_select", "take", takes_rows=True)
def looked_up(tape: Tape, x: Any, *_: Any, **__: Any) -> Any:
    raise refuse(
        "E0901", "a lookup by name", "written with brackets in mods", "write tensor[b, h, q_idx, kv_idx]"
    )
