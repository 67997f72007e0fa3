"""torch's operations on scalars, as entries of a tape: one function for each, by torch's name. Here are those
that convert and make numbers, arithmetic, comparisons and choices; `functions` has the others.

A condition where a number is expected counts as 0 or 1, as in torch. Operations that the language lacks are
composed of those that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from attnc.expr.nodes import Type
from attnc.flex.errors import refuse
from attnc.flex.symbols import NARROW, OPERATIONS, Scalar, scalar
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


def number(tape: Tape, value: Any) -> Scalar:
    """Returns a value as a number: 1 for true, 0 for false."""
    found = scalar(tape, value)
    if found.kind != "bool":
        return found
    one, zero = tape.add("int", "integer", 1), tape.add("int", "integer", 0)
    return Scalar(tape, tape.add("int", "call", "where", found.at, one, zero), 0, 1)


def are_conditions(*values: Scalar) -> bool:
    return all(value.kind == "bool" for value in values)


def condition(tape: Tape, value: Any) -> Scalar:
    """Returns a value as true or false: numbers other than 0 are true."""
    found = scalar(tape, value)
    if found.kind == "bool":
        return found
    return Scalar(tape, tape.add("bool", "!=", found.at, tape.add("int", "integer", 0)))


def real(tape: Tape, value: Any) -> Scalar:
    """Returns a value as a float."""
    found = number(tape, value)
    if found.kind == "float":
        return found
    return Scalar(tape, tape.add("float", "real", found.at), found.low, found.high)


def integer(tape: Tape, value: int) -> Scalar:
    """Returns a number of ours, which is part of the structure."""
    return Scalar(tape, tape.add("int", "integer", value), value, value)


@operation("to", "type", "type_as", "_to")
def to(tape: Tape, x: Any, *args: Any, **kwargs: Any) -> Scalar:
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    wanted += [value.dtype for value in args if isinstance(value, torch.Tensor | Scalar)]
    return _convert(tape, scalar(tape, x), wanted[0] if wanted else None)


def _convert(tape: Tape, x: Scalar, dtype: torch.dtype | None) -> Scalar:
    if dtype is None or dtype == x.dtype:
        return x
    if dtype is torch.bool:
        return condition(tape, x)
    if dtype.is_floating_point:
        # Floats are computed in float32 whatever their type.
        return real(tape, x)
    if x.kind == "float":
        if x.quotient is None:
            raise refuse(
                "E0901",
                "a float cannot become an integer",
                "specs have no such conversion",
                "divide integers by '//', or torch.div(a, b, rounding_mode='floor'); what follows from"
                " integers alone, such as the bucket of a distance, can be looked up in a tensor",
            )
        x = _truncate(tape, *x.quotient)
    found = number(tape, x)
    return _wrap(tape, Scalar(tape, found.at, found.low, found.high), dtype)


def _truncate(tape: Tape, x: Scalar, y: Scalar) -> Scalar:
    floor = _binary(tape, "//", x, y)
    if x.low >= 0 and y.low >= 0:
        return floor
    is_rounded = logical_and(
        tape, compare(tape, "<", floor, integer(tape, 0)), compare(tape, "!=", mul(tape, floor, y), x)
    )
    return where(tape, is_rounded, add(tape, floor, integer(tape, 1)), floor)


def _wrap(tape: Tape, x: Scalar, dtype: torch.dtype) -> Scalar:
    """Returns an integer as a type holds it: of a narrow one, which it may leave, the number that is as many
    times 2^bits away as it takes.
    """
    if dtype not in NARROW:
        return x
    within = torch.iinfo(dtype)
    at = x.at
    if x.low < within.min or x.high > within.max:
        least, count = integer(tape, within.min).at, integer(tape, 1 << within.bits).at
        above = tape.add("int", "%", tape.add("int", "-", at, least), count)
        at = tape.add("int", "+", above, least)
    low, high = max(x.low, within.min), min(x.high, within.max)
    if at != x.at:
        low, high = within.min, within.max
    return Scalar(tape, at, low, high, narrow=dtype)


def like(tape: Tape, result: Scalar, *operands: Scalar) -> Scalar:
    """Returns the result of an operation on these as torch has it: of the narrow type of all that are
    integers, but for numbers of Python's, whose type does not matter; unchanged where there is none.
    """
    narrow: torch.dtype | None = None
    for operand in operands:
        is_number = tape.entries[operand.at][0] in ("number", "integer")
        if operand.kind == "bool" or (operand.kind == "int" and is_number):
            continue
        if operand.narrow is None:
            return result
        narrow = operand.narrow if narrow is None else torch.promote_types(narrow, operand.narrow)
    return result if narrow is None or result.kind != "int" else _wrap(tape, result, narrow)


for _name, _dtype in {
    "float": torch.float32, "double": torch.float32, "half": torch.float32, "bfloat16": torch.float32,
    "int": torch.int32, "long": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}.items():  # fmt: skip
    OPERATIONS[_name] = lambda tape, x, _dtype=_dtype: _convert(tape, scalar(tape, x), _dtype)


@operation(
    "clone", "contiguous", "positive", "view", "reshape", "squeeze", "unsqueeze", "expand", "expand_as",
    "flatten", "broadcast_to", "cuda", "cpu", "alias", "view_as", "reshape_as",
)  # fmt: skip
def same(tape: Tape, x: Any, *args: Any, **kwargs: Any) -> Scalar:
    """Returns a single value as it is, for operations that do not change one."""
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        raise refuse("E0901", "bits as another type", "specs have no bits", "convert the value: .to(dtype)")
    return scalar(tape, x)


@operation("detach")
def detach(tape: Tape, x: Any) -> Scalar:
    found = scalar(tape, x)
    if found.kind == "float":
        raise refuse("E0901", "'detach' cannot be written in a spec", "gradients go through every operation")
    return found


def _make_number(tape: Tape, value: Any, dtype: torch.dtype) -> Scalar:
    if isinstance(value, bool | int | float):
        kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
        value = kind(value)
    return _convert(tape, scalar(tape, value), dtype)


def _register_filled(name: str, value: Any) -> None:
    def fill(tape: Tape, x: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Scalar:
        return _make_number(tape, value, scalar(tape, x).dtype if dtype is None else dtype)

    for each in (f"{name}_like", f"new_{name}"):
        OPERATIONS[each] = fill


_register_filled("zeros", 0)
_register_filled("ones", 1)


@operation("full_like")
def full_like(tape: Tape, x: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Scalar:
    return _make_number(tape, fill_value, scalar(tape, x).dtype if dtype is None else dtype)


@operation("new_full")
def new_full(
    tape: Tape, x: Any, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> Scalar:
    return full_like(tape, x, fill_value, dtype=dtype)


@operation("new_tensor")
def new_tensor(tape: Tape, x: Any, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Scalar:
    return full_like(tape, x, data, dtype=dtype)


# --- sums and products and what integers lie between --------------------------------------------------------


def _binary(tape: Tape, symbol: str, x: Any, y: Any) -> Scalar:
    operands = scalar(tape, x), scalar(tape, y)
    a, b = (number(tape, operand) for operand in operands)
    kind: Type = "float" if symbol == "/" or "float" in (a.kind, b.kind) else "int"
    low, high = _between(symbol, a, b)
    return like(tape, Scalar(tape, tape.add(kind, symbol, a.at, b.at), low, high), *operands)


def _between(symbol: str, a: Scalar, b: Scalar) -> tuple[float, float]:
    match symbol:
        case "+":
            return a.low + b.low, a.high + b.high
        case "-":
            return a.low - b.high, a.high - b.low
        case "*" if a.low >= 0 and b.low >= 0:
            return a.low * b.low, math.inf
        case "//" if b.low == b.high and b.low > 0:
            low, high = (bound // b.low if math.isfinite(bound) else bound for bound in (a.low, a.high))
            return low, high
        case "//" if a.low >= 0 and b.low >= 0:
            return 0, a.high
        case "%" if b.low >= 0:
            return 0, max(b.high - 1, 0)
    return -math.inf, math.inf


@operation("add")
def add(tape: Tape, x: Any, y: Any, *, alpha: Any = 1) -> Scalar:
    """Adds; of two conditions, as in torch, whether one of them holds."""
    x, y = scalar(tape, x), scalar(tape, y)
    if alpha == 1 and are_conditions(x, y):
        return logical_or(tape, x, y)
    return _binary(tape, "+", x, y if alpha == 1 else mul(tape, y, alpha))


@operation("sub", "subtract")
def sub(tape: Tape, x: Any, y: Any, *, alpha: Any = 1) -> Scalar:
    return _binary(tape, "-", x, y if alpha == 1 else mul(tape, y, alpha))


@operation("rsub")
def rsub(tape: Tape, x: Any, y: Any) -> Scalar:
    return sub(tape, y, x)


@operation("mul", "multiply")
def mul(tape: Tape, x: Any, y: Any) -> Scalar:
    """Multiplies; of two conditions, as in torch, whether both hold."""
    x, y = scalar(tape, x), scalar(tape, y)
    return logical_and(tape, x, y) if are_conditions(x, y) else _binary(tape, "*", x, y)


@operation("div", "divide", "true_divide", "truediv")
def div(tape: Tape, x: Any, y: Any, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode == "floor":
        return floor_divide(tape, x, y)
    a, b = number(tape, x), number(tape, y)
    are_integers = a.kind == b.kind == "int"
    if rounding_mode == "trunc" and are_integers:
        return _truncate(tape, a, b)
    if rounding_mode is not None:
        raise refuse("E0901", f"rounding_mode={rounding_mode!r}", "specs round quotients of integers alone")
    found = _binary(tape, "/", a, b)
    return Scalar(tape, found.at, quotient=(a, b) if are_integers else None)


@operation("floor_divide", "floordiv")
def floor_divide(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    if "float" in (a.kind, b.kind):
        raise refuse("E0901", "'//' of floats cannot be written in a spec", "'//' is for integers")
    return _binary(tape, "//", a, b)


@operation("floor")
def floor(tape: Tape, x: Any) -> Scalar:
    return _round_quotient("floor", tape, x, floor_divide)


@operation("ceil")
def ceil(tape: Tape, x: Any) -> Scalar:
    return _round_quotient("ceil", tape, x, lambda tape, a, b: neg(tape, floor_divide(tape, neg(tape, a), b)))


@operation("trunc", "fix")
def trunc(tape: Tape, x: Any) -> Scalar:
    return _round_quotient("trunc", tape, x, _truncate)


def _round_quotient(
    name: str, tape: Tape, x: Any, divide: Callable[[Tape, Scalar, Scalar], Scalar]
) -> Scalar:
    found = number(tape, x)
    if found.kind == "int":
        return found
    if found.quotient is None:
        raise refuse("E0901", f"'{name}' cannot be written in a spec", "but of a quotient of integers")
    return divide(tape, *found.quotient)


@operation("remainder", "mod")
def remainder(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = number(tape, x), number(tape, y)
    if "float" in (a.kind, b.kind):
        raise refuse("E0901", "'%' of floats cannot be written in a spec", "'%' is for integers")
    return _binary(tape, "%", a, b)


@operation("fmod")
def fmod(tape: Tape, x: Any, y: Any) -> Scalar:
    """Computes the remainder of a quotient that is truncated: its sign is that of the first operand."""
    a, b = number(tape, x), number(tape, y)
    if a.kind == b.kind == "int" and (a.low < 0 or b.low < 0):
        found = remainder(tape, absolute(tape, a), absolute(tape, b))
        return where(tape, compare(tape, "<", a, integer(tape, 0)), neg(tape, found), found)
    return remainder(tape, a, b)


@operation("neg", "negative")
def neg(tape: Tape, x: Any) -> Scalar:
    found = number(tape, x)
    return like(tape, Scalar(tape, tape.add(found.kind, "neg", found.at), -found.high, -found.low), found)


@operation("abs", "absolute")
def absolute(tape: Tape, x: Any) -> Scalar:
    found = number(tape, x)
    low, high = max(found.low, -found.high, 0), max(-found.low, found.high)
    return like(tape, Scalar(tape, tape.add(found.kind, "call", "abs", found.at), low, high), found)


@operation("fmin")
def minimum(tape: Tape, x: Any, y: Any) -> Scalar:
    """Takes the smaller number, the first of two equal ones; of two conditions, as in torch, whether both
    hold.
    """
    operands = scalar(tape, x), scalar(tape, y)
    if are_conditions(*operands):
        return logical_and(tape, *operands)
    a, b = (number(tape, operand) for operand in operands)
    kind = "float" if "float" in (a.kind, b.kind) else a.kind
    low, high = min(a.low, b.low), min(a.high, b.high)
    return like(tape, Scalar(tape, tape.add(kind, "call", "min", a.at, b.at), low, high), *operands)


@operation("fmax")
def maximum(tape: Tape, x: Any, y: Any) -> Scalar:
    """Takes the larger number, the first of two equal ones; of two conditions, as in torch, whether one of
    them holds.
    """
    operands = scalar(tape, x), scalar(tape, y)
    if are_conditions(*operands):
        return logical_or(tape, *operands)
    a, b = (number(tape, operand) for operand in operands)
    kind = "float" if "float" in (a.kind, b.kind) else a.kind
    low, high = max(a.low, b.low), max(a.high, b.high)
    return like(tape, Scalar(tape, tape.add(kind, "call", "max", a.at, b.at), low, high), *operands)


@operation("minimum")
def smaller(tape: Tape, x: Any, y: Any) -> Scalar:
    """Takes the smaller number. Of equal ones each has half of the gradient."""
    return _halved_if_equal(tape, x, y, minimum(tape, x, y))


@operation("maximum")
def larger(tape: Tape, x: Any, y: Any) -> Scalar:
    """Takes the larger number. Of equal ones each has half of the gradient."""
    return _halved_if_equal(tape, x, y, maximum(tape, x, y))


def _halved_if_equal(tape: Tape, x: Any, y: Any, found: Scalar) -> Scalar:
    """Returns one of two numbers that was found; where they are equal, their mean. Without a gradient that is
    the same; infinities, of which there is none, have no mean.
    """
    if found.kind != "float" or not tape.has_derivative(found.at) or tape.may_be_infinite(found.at):
        return found
    a, b = scalar(tape, x), scalar(tape, y)
    mean = add(tape, mul(tape, 0.5, a), mul(tape, 0.5, b))
    return like(tape, where(tape, compare(tape, "==", a, b), mean, found), found)


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


@operation("square")
def square(tape: Tape, x: Any) -> Scalar:
    return mul(tape, x, x)


@operation("lerp")
def lerp(tape: Tape, x: Any, end: Any, weight: Any) -> Scalar:
    return add(tape, x, mul(tape, weight, sub(tape, end, x)))


@operation("addcmul")
def addcmul(tape: Tape, x: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Scalar:
    return add(tape, x, mul(tape, tensor1, tensor2), alpha=value)


# --- comparisons and choices --------------------------------------------------------------------------------


def compare(tape: Tape, symbol: str, x: Any, y: Any) -> Scalar:
    a, b = scalar(tape, x), scalar(tape, y)
    if a.kind == b.kind == "bool" and symbol in ("==", "!="):
        return Scalar(tape, tape.add("bool", symbol, a.at, b.at))
    a, b = number(tape, a), number(tape, b)
    for operand in (a, b):
        entry = tape.entries[operand.at]
        if entry[0] == "load":
            tape.compared.add(entry[1])
    return Scalar(tape, tape.add("bool", symbol, a.at, b.at))


for _name, _symbol in {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=",
}.items():  # fmt: skip
    OPERATIONS[_name] = lambda tape, x, y, _symbol=_symbol: compare(tape, _symbol, x, y)


@operation("logical_and")
def logical_and(tape: Tape, x: Any, y: Any) -> Scalar:
    return _join_conditions(tape, "and", x, y, decides=False)


@operation("logical_or")
def logical_or(tape: Tape, x: Any, y: Any) -> Scalar:
    return _join_conditions(tape, "or", x, y, decides=True)


def _join_conditions(tape: Tape, word: str, x: Any, y: Any, *, decides: bool) -> Scalar:
    """Returns two conditions joined. decides: the value of one that is the result whatever the other is."""
    a, b = condition(tape, x), condition(tape, y)
    for one, other in ((a, b), (b, a)):
        if (known := tape.constant(one.at)) is not None:
            return one if known == decides else other
    return Scalar(tape, tape.add("bool", word, a.at, b.at))


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
    return Scalar(tape, tape.add("bool", "!=", a.at, b.at))


@operation("where")
def where(tape: Tape, wanted: Any, x: Any, y: Any) -> Scalar:
    chosen = condition(tape, wanted)
    a, b = scalar(tape, x), scalar(tape, y)
    if (known := tape.constant(chosen.at)) is not None:
        return a if known else b
    if (a.kind == "bool") != (b.kind == "bool"):
        a, b = number(tape, a), number(tape, b)
    kind = "float" if "float" in (a.kind, b.kind) else a.kind
    low, high = min(a.low, b.low), max(a.high, b.high)
    return like(tape, Scalar(tape, tape.add(kind, "call", "where", chosen.at, a.at, b.at), low, high), a, b)


@operation("masked_fill")
def masked_fill(tape: Tape, x: Any, mask: Any, value: Any) -> Scalar:
    return where(tape, mask, value, x)
