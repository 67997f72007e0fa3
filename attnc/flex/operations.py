"""torch's operations on scalars, as entries of a tape: one function for each, by torch's name.

A condition where a number is expected counts as 0 or 1, as in torch. Operations that the language lacks are
composed of those that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from attnc.flex.errors import refused
from attnc.flex.symbols import OPERATIONS, Indexed, Scalar, Vector, scalar
from attnc.flex.tape import Tape

Operation: TypeAlias = Callable[..., Any]
Made = TypeVar("Made", bound=Operation)


def operation(*names: str, takes_rows: bool = False) -> Callable[[Made], Made]:
    """Makes a function the operation of these names. takes_rows: it is given rows of a tensor whole."""

    def register(function: Made) -> Made:
        function.takes_rows = takes_rows  # type: ignore[attr-defined]  # a mark for `symbols.apply`
        for name in names:
            OPERATIONS[name] = function
        return function

    return register


# --- conversions


def number(tape: Tape, value: Any) -> Scalar:
    """A value as a number: 1 for true, 0 for false."""
    found = scalar(tape, value)
    if found.type != "bool":
        return found
    one, zero = tape.add("int", "integer", 1), tape.add("int", "integer", 0)
    return Scalar(tape, tape.add("int", "call", "where", found.at, one, zero), 0, 1)


def condition(tape: Tape, value: Any) -> Scalar:
    """A value as true or false: numbers other than 0 are true."""
    found = scalar(tape, value)
    if found.type == "bool":
        return found
    return Scalar(tape, tape.add("bool", "!=", found.at, tape.add("int", "integer", 0)))


def real(tape: Tape, value: Any) -> Scalar:
    """A value as a float."""
    found = number(tape, value)
    if found.type == "float":
        return found
    return Scalar(tape, tape.add("float", "real", found.at), found.low, found.high)


def integer(tape: Tape, value: int) -> Scalar:
    """A number of ours, which is part of the structure."""
    return Scalar(tape, tape.add("int", "integer", value), value, value)


@operation("to", "type", "type_as", "_to")
def to(tape: Tape, x: Any, *args: Any, **kwargs: Any) -> Scalar:
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    wanted += [value.dtype for value in args if isinstance(value, torch.Tensor | Scalar)]
    return _converted(tape, scalar(tape, x), wanted[0] if wanted else None)


def _converted(tape: Tape, x: Scalar, dtype: torch.dtype | None) -> Scalar:
    if dtype is None or dtype == x.dtype:
        return x
    if dtype is torch.bool:
        return condition(tape, x)
    if dtype.is_floating_point:
        # Floats are computed in float32 whatever their type.
        return real(tape, x)
    if x.type == "float":
        if x.floor_at is not None:
            return Scalar(tape, x.floor_at, x.low, x.high)
        raise refused(
            "E0901",
            "a float cannot become an integer",
            "specs have no such conversion",
            "divide integers by '//', or torch.div(a, b, rounding_mode='floor')",
        )
    return number(tape, x)


for _name, _dtype in {
    "float": torch.float32, "double": torch.float32, "half": torch.float32, "bfloat16": torch.float32,
    "int": torch.int32, "long": torch.int32, "short": torch.int32, "bool": torch.bool,
}.items():  # fmt: skip
    OPERATIONS[_name] = lambda tape, x, _dtype=_dtype: _converted(tape, scalar(tape, x), _dtype)


@operation(
    "clone", "contiguous", "positive", "view", "reshape", "squeeze", "unsqueeze", "expand", "expand_as",
    "flatten", "broadcast_to", "cuda", "cpu", "alias", "view_as", "reshape_as",
)  # fmt: skip
def same(tape: Tape, x: Any, *_: Any, **__: Any) -> Scalar:
    """What leaves a single value as it is."""
    return scalar(tape, x)


@operation("detach")
def detach(tape: Tape, x: Any) -> Scalar:
    found = scalar(tape, x)
    if found.type == "float":
        raise refused("E0901", "'detach' cannot be written in a spec", "gradients go through every operation")
    return found


# --- constants


def _filled(name: str, value: Any) -> None:
    def fill(tape: Tape, x: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Scalar:
        kind = scalar(tape, x).dtype if dtype is None else dtype
        made = bool(value) if kind is torch.bool else float(value) if kind.is_floating_point else int(value)
        return scalar(tape, made)

    for each in (f"{name}_like", f"new_{name}"):
        OPERATIONS[each] = fill


_filled("zeros", 0)
_filled("ones", 1)


@operation("full_like")
def full_like(tape: Tape, x: Any, fill_value: Any, **_: Any) -> Scalar:
    return scalar(tape, fill_value)


@operation("new_full")
def new_full(tape: Tape, x: Any, size: Any, fill_value: Any, **_: Any) -> Scalar:
    return scalar(tape, fill_value)


@operation("new_tensor")
def new_tensor(tape: Tape, x: Any, data: Any, **_: Any) -> Scalar:
    return scalar(tape, data)


# --- arithmetic


def _binary(tape: Tape, symbol: str, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    kind = "float" if symbol == "/" or "float" in (a.type, b.type) else "int"
    low, high = _between(symbol, a, b)
    return Scalar(tape, tape.add(kind, symbol, a.at, b.at), low, high)  # type: ignore[arg-type]  # a literal


def _between(symbol: str, a: Scalar, b: Scalar) -> tuple[float, float]:
    """What the result lies between. Only signs matter to anyone, so products of unknowns are unknown."""
    match symbol:
        case "+":
            return a.low + b.low, a.high + b.high
        case "-":
            return a.low - b.high, a.high - b.low
        case "*" if a.low >= 0 and b.low >= 0:
            return a.low * b.low, math.inf
        case "//" if b.low == b.high and b.low > 0:
            return a.low // b.low, a.high // b.low if math.isfinite(a.high) else math.inf
        case "//" if a.low >= 0 and b.low >= 0:
            return 0, a.high
        case "%" if b.low >= 0:
            return 0, max(b.high - 1, 0)
    return -math.inf, math.inf


@operation("add", "__add__")
def add(tape: Tape, x: Any, y: Any, *, alpha: Any = 1) -> Scalar:
    return _binary(tape, "+", x, y if alpha == 1 else mul(tape, y, alpha))


@operation("sub", "subtract")
def sub(tape: Tape, x: Any, y: Any, *, alpha: Any = 1) -> Scalar:
    return _binary(tape, "-", x, y if alpha == 1 else mul(tape, y, alpha))


@operation("rsub")
def rsub(tape: Tape, x: Any, y: Any) -> Scalar:
    return sub(tape, y, x)


@operation("mul", "multiply")
def mul(tape: Tape, x: Any, y: Any) -> Scalar:
    return _binary(tape, "*", x, y)


@operation("div", "divide", "true_divide", "truediv")
def div(tape: Tape, x: Any, y: Any, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode == "floor":
        return floor_divide(tape, x, y)
    if rounding_mode is not None:
        raise refused(
            "E0901", f"rounding_mode={rounding_mode!r}", "specs round towards minus infinity", "use 'floor'"
        )
    a, b = number(tape, x), number(tape, y)
    quotient = _binary(tape, "/", a, b)
    if a.type == b.type == "int":
        quotient.floor_at = tape.add("int", "//", a.at, b.at)
    return quotient


@operation("floor_divide", "floordiv")
def floor_divide(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    if "float" in (a.type, b.type):
        raise refused("E0901", "'//' of floats cannot be written in a spec", "'//' is for integers")
    return _binary(tape, "//", a, b)


@operation("floor")
def floor(tape: Tape, x: Any) -> Scalar:
    found = number(tape, x)
    if found.type == "int":
        return found
    if found.floor_at is None:
        raise refused("E0901", "'floor' cannot be written in a spec", "but of a quotient of integers")
    return Scalar(tape, found.floor_at, found.low, found.high, floor=found.floor_at)


@operation("remainder", "mod")
def remainder(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    if "float" in (a.type, b.type):
        raise refused("E0901", "'%' of floats cannot be written in a spec", "'%' is for integers")
    return _binary(tape, "%", a, b)


@operation("fmod")
def fmod(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    if a.low < 0 or b.low < 0:
        raise refused(
            "E0901", "'fmod' of what may be negative", "specs have '%', whose sign is the divisor's"
        )
    return remainder(tape, a, b)


@operation("neg", "negative")
def neg(tape: Tape, x: Any) -> Scalar:
    found = number(tape, x)
    return Scalar(tape, tape.add(found.type, "neg", found.at), -found.high, -found.low)


@operation("abs", "absolute")
def absolute(tape: Tape, x: Any) -> Scalar:
    found = number(tape, x)
    low = max(found.low, -found.high, 0)
    return Scalar(tape, tape.add(found.type, "call", "abs", found.at), low, max(-found.low, found.high))


@operation("minimum", "fmin")
def minimum(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    kind = "float" if "float" in (a.type, b.type) else a.type
    low, high = min(a.low, b.low), min(a.high, b.high)
    return Scalar(tape, tape.add(kind, "call", "min", a.at, b.at), low, high)


@operation("maximum", "fmax")
def maximum(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    kind = "float" if "float" in (a.type, b.type) else a.type
    low, high = max(a.low, b.low), max(a.high, b.high)
    return Scalar(tape, tape.add(kind, "call", "max", a.at, b.at), low, high)


@operation("clamp", "clip")
def clamp(tape: Tape, x: Any, min: Any = None, max: Any = None) -> Scalar:
    found = number(tape, x)
    if min is not None:
        found = maximum(tape, found, min)
    return found if max is None else minimum(tape, found, max)


@operation("clamp_min")
def clamp_min(tape: Tape, x: Any, min: Any) -> Scalar:
    return maximum(tape, x, min)


@operation("clamp_max")
def clamp_max(tape: Tape, x: Any, max: Any) -> Scalar:
    return minimum(tape, x, max)


@operation("sign", "sgn")
def sign(tape: Tape, x: Any) -> Scalar:
    positive = where(tape, _compare(tape, ">", x, 0), integer(tape, 1), integer(tape, 0))
    return where(tape, _compare(tape, "<", x, 0), integer(tape, -1), positive)


@operation("square")
def square(tape: Tape, x: Any) -> Scalar:
    return mul(tape, x, x)


@operation("pow", "float_power")
def power(tape: Tape, x: Any, exponent: Any) -> Scalar:
    """Whole and half powers; the exponent is part of the structure. Powers of a positive number, by exp."""
    if (
        isinstance(exponent, int | float)
        and not isinstance(exponent, bool)
        and 2 * exponent == int(2 * exponent)
    ):
        if abs(exponent) <= 8:
            return _power(tape, x, exponent)
    if isinstance(x, int | float) and x > 0:
        return function(tape, "exp", mul(tape, exponent, math.log(x)))
    raise refused(
        "E0901", "'pow' with this exponent", "specs multiply: exponents are -8 to 8 in steps of 1/2"
    )


def _power(tape: Tape, x: Any, exponent: float) -> Scalar:
    if exponent < 0:
        return div(tape, 1, _power(tape, x, -exponent))
    base, result = number(tape, x), None
    for _ in range(int(exponent)):
        result = base if result is None else mul(tape, result, base)
    if exponent != int(exponent):
        root = function(tape, "sqrt", base)
        result = root if result is None else mul(tape, result, root)
    return real(tape, 1) if result is None else result


@operation("lerp")
def lerp(tape: Tape, x: Any, y: Any, weight: Any) -> Scalar:
    return add(tape, x, mul(tape, weight, sub(tape, y, x)))


@operation("addcmul")
def addcmul(tape: Tape, x: Any, y: Any, z: Any, *, value: Any = 1) -> Scalar:
    return add(tape, x, mul(tape, y, z), alpha=value)


# --- functions


def function(tape: Tape, name: str, x: Any) -> Scalar:
    """An intrinsic of the language."""
    return Scalar(tape, tape.add("float", "call", name, number(tape, x).at))


for _name in ("exp", "log", "tanh", "sqrt"):
    OPERATIONS[_name] = lambda tape, x, _name=_name: function(tape, _name, x)


@operation("exp2", "special_exp2")
def exp2(tape: Tape, x: Any) -> Scalar:
    return function(tape, "exp", mul(tape, x, math.log(2)))


@operation("log2")
def log2(tape: Tape, x: Any) -> Scalar:
    return mul(tape, function(tape, "log", x), 1 / math.log(2))


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


@operation("sigmoid", "special_expit")
def sigmoid(tape: Tape, x: Any) -> Scalar:
    """By tanh, which neither overflows nor cancels."""
    return add(tape, 0.5, mul(tape, 0.5, function(tape, "tanh", mul(tape, 0.5, x))))


@operation("logsigmoid")
def logsigmoid(tape: Tape, x: Any) -> Scalar:
    return neg(tape, softplus(tape, neg(tape, x)))


@operation("softplus")
def softplus(tape: Tape, x: Any, beta: Any = 1, threshold: Any = 20) -> Scalar:
    scaled = x if beta == 1 else mul(tape, beta, x)
    inner = function(tape, "exp", neg(tape, absolute(tape, scaled)))
    found = add(tape, maximum(tape, scaled, 0.0), log1p(tape, inner))
    return found if beta == 1 else div(tape, found, beta)


@operation("silu")
def silu(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return mul(tape, x, sigmoid(tape, x))


@operation("relu")
def relu(tape: Tape, x: Any, inplace: bool = False) -> Scalar:
    return maximum(tape, x, 0)


@operation("leaky_relu")
def leaky_relu(tape: Tape, x: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Scalar:
    return where(tape, _compare(tape, ">", x, 0), x, mul(tape, x, negative_slope))


@operation("elu")
def elu(tape: Tape, x: Any, alpha: Any = 1.0, inplace: bool = False) -> Scalar:
    below = mul(tape, alpha, expm1(tape, minimum(tape, x, 0.0)))
    return where(tape, _compare(tape, ">", x, 0), x, below)


@operation("gelu")
def gelu(tape: Tape, x: Any, *, approximate: str = "none") -> Scalar:
    if approximate != "tanh":
        raise refused(
            "E0901", "'gelu' needs erf, which specs lack", "exact", "write gelu(x, approximate='tanh')"
        )
    cubic = mul(tape, 0.044715, _power(tape, x, 3))
    inner = mul(tape, math.sqrt(2 / math.pi), add(tape, x, cubic))
    return mul(tape, mul(tape, 0.5, x), add(tape, 1.0, function(tape, "tanh", inner)))


@operation("cosh")
def cosh(tape: Tape, x: Any) -> Scalar:
    return mul(tape, 0.5, add(tape, function(tape, "exp", x), function(tape, "exp", neg(tape, x))))


@operation("sinh")
def sinh(tape: Tape, x: Any) -> Scalar:
    return mul(tape, 0.5, sub(tape, function(tape, "exp", x), function(tape, "exp", neg(tape, x))))


# --- comparisons and logic


def _compare(tape: Tape, symbol: str, x: Any, y: Any) -> Scalar:
    a, b = scalar(tape, x), scalar(tape, y)
    if a.type == b.type == "bool":
        return _compare_conditions(tape, symbol, a, b)
    a, b = number(tape, a), number(tape, b)
    for operand in (a, b):
        entry = tape.entries[operand.at]
        if entry[0] == "load":
            tape.compared.add(entry[1])
    return Scalar(tape, tape.add("bool", symbol, a.at, b.at))


def _compare_conditions(tape: Tape, symbol: str, a: Scalar, b: Scalar) -> Scalar:
    if symbol in ("==", "!="):
        differs = exclusive_or(tape, a, b)
        return invert(tape, differs) if symbol == "==" else differs
    return _compare(tape, symbol, number(tape, a), number(tape, b))


for _name, _symbol in {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=",
}.items():  # fmt: skip
    OPERATIONS[_name] = lambda tape, x, y, _symbol=_symbol: _compare(tape, _symbol, x, y)


def _conditions(tape: Tape, name: str, *values: Any) -> list[Scalar]:
    """The operands of an operation on bits, which are conditions."""
    found = [scalar(tape, value) for value in values]
    if any(value.type != "bool" for value in found):
        hint = "compare first; whole powers of 2 divide by '//' and leave remainders by '%'"
        raise refused(
            "E0901", f"'{name}' of integers cannot be written in a spec", "specs have no bits", hint
        )
    return found


@operation("bitwise_and")
def bitwise_and(tape: Tape, x: Any, y: Any) -> Scalar:
    return logical_and(tape, *_conditions(tape, "&", x, y))


@operation("bitwise_or")
def bitwise_or(tape: Tape, x: Any, y: Any) -> Scalar:
    return logical_or(tape, *_conditions(tape, "|", x, y))


@operation("bitwise_xor")
def bitwise_xor(tape: Tape, x: Any, y: Any) -> Scalar:
    return exclusive_or(tape, *_conditions(tape, "^", x, y))


@operation("bitwise_not", "invert")
def bitwise_not(tape: Tape, x: Any) -> Scalar:
    found = scalar(tape, x)
    return invert(tape, found) if found.type == "bool" else sub(tape, integer(tape, -1), found)


@operation("logical_and")
def logical_and(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = condition(tape, x), condition(tape, y)
    for one, other in ((a, b), (b, a)):
        if (known := tape.constant(one.at)) is not None:
            return other if known else one
    return Scalar(tape, tape.add("bool", "and", a.at, b.at))


@operation("logical_or")
def logical_or(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = condition(tape, x), condition(tape, y)
    for one, other in ((a, b), (b, a)):
        if (known := tape.constant(one.at)) is not None:
            return one if known else other
    return Scalar(tape, tape.add("bool", "or", a.at, b.at))


@operation("logical_not")
def invert(tape: Tape, x: Any) -> Scalar:
    found = condition(tape, x)
    if (known := tape.constant(found.at)) is not None:
        return scalar(tape, not known)
    entry = tape.entries[found.at]
    return Scalar(tape, entry[1] if entry[0] == "not" else tape.add("bool", "not", found.at))


@operation("logical_xor")
def exclusive_or(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = condition(tape, x), condition(tape, y)
    return Scalar(tape, tape.add("bool", "call", "where", a.at, invert(tape, b).at, b.at))


@operation("bitwise_left_shift", "lshift")
def left_shift(tape: Tape, x: Any, y: Any) -> Scalar:
    return mul(tape, x, _power_of_two(y))


@operation("bitwise_right_shift", "rshift")
def right_shift(tape: Tape, x: Any, y: Any) -> Scalar:
    return floor_divide(tape, x, _power_of_two(y))


def _power_of_two(bits: Any) -> int:
    if not isinstance(bits, int) or not 0 <= bits < 31:
        raise refused("E0901", "a shift by a value of the mod", "specs have no bits", "shift by a number")
    return 1 << int(bits)


@operation("where")
def where(tape: Tape, wanted: Any, x: Any, y: Any) -> Scalar:
    chosen = condition(tape, wanted)
    a, b = scalar(tape, x), scalar(tape, y)
    if (known := tape.constant(chosen.at)) is not None:
        return a if known else b
    if (a.type == "bool") != (b.type == "bool"):
        a, b = number(tape, a), number(tape, b)
    kind = "float" if "float" in (a.type, b.type) else a.type
    low, high = min(a.low, b.low), max(a.high, b.high)
    return Scalar(tape, tape.add(kind, "call", "where", chosen.at, a.at, b.at), low, high)


@operation("masked_fill")
def masked_fill(tape: Tape, x: Any, mask: Any, value: Any) -> Scalar:
    return where(tape, mask, value, x)


@operation("isneginf", "isposinf", "isinf", "isnan", "isfinite")
def is_special(tape: Tape, x: Any) -> Scalar:
    raise refused(
        "E0901", "tests for infinities and NaN cannot be written in a spec", "no spec has this operation"
    )


# --- rows of captured tensors


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
