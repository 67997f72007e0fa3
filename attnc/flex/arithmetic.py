"""Sums, products, quotients, and what integers lie between."""

from __future__ import annotations

import math
from typing import Any

from attnc.flex.errors import refused
from attnc.flex.operations import number, operation
from attnc.flex.symbols import Scalar
from attnc.flex.tape import Tape


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


@operation("square")
def square(tape: Tape, x: Any) -> Scalar:
    return mul(tape, x, x)


@operation("lerp")
def lerp(tape: Tape, x: Any, y: Any, weight: Any) -> Scalar:
    return add(tape, x, mul(tape, weight, sub(tape, y, x)))


@operation("addcmul")
def addcmul(tape: Tape, x: Any, y: Any, z: Any, *, value: Any = 1) -> Scalar:
    return add(tape, x, mul(tape, y, z), alpha=value)
