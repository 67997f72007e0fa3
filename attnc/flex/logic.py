"""Comparisons, conditions, and choices between values."""

from __future__ import annotations

from typing import Any

from attnc.flex.arithmetic import floor_divide, mul, sub
from attnc.flex.errors import refused
from attnc.flex.operations import condition, integer, number, operation
from attnc.flex.symbols import OPERATIONS, Scalar, scalar
from attnc.flex.tape import Tape


def compare(tape: Tape, symbol: str, x: Any, y: Any) -> Scalar:
    a, b = scalar(tape, x), scalar(tape, y)
    if a.type == b.type == "bool" and symbol in ("==", "!="):
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
    return Scalar(tape, tape.add("bool", "!=", a.at, b.at))


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
