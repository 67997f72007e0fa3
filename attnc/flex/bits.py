"""torch's operations on bits: those of conditions are logical, those of integers are composed of '//' and
'%', which see a negative number as its bits in two's complement.
"""

from __future__ import annotations

import math
from itertools import count, takewhile
from typing import Any

from attnc.flex.errors import refuse
from attnc.flex.operations import (
    add,
    are_conditions,
    compare,
    exclusive_or,
    floor_divide,
    integer,
    invert,
    like,
    logical_and,
    logical_or,
    mul,
    number,
    operation,
    remainder,
    sub,
    where,
)
from attnc.flex.symbols import Scalar, scalar
from attnc.flex.tape import Tape

#: Bits of the integers that specs compute with.
_BITS = 32
#: Most bits of which each is looked at, where both operands are values of the mod.
_MOST_BITS = 24


@operation("bitwise_and", "and")
def bitwise_and(tape: Tape, x: Any, y: Any) -> Scalar:
    """Returns whether both conditions hold, or the bits that both integers have."""
    a, b = _operand(tape, x), _operand(tape, y)
    if are_conditions(a, b):
        return logical_and(tape, a, b)
    return like(tape, _common(tape, "&", a, b), a, b)


@operation("bitwise_or", "or")
def bitwise_or(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = _operand(tape, x), _operand(tape, y)
    if are_conditions(a, b):
        return logical_or(tape, a, b)
    return _without(tape, _common(tape, "|", a, b), a, b)


@operation("bitwise_xor", "xor")
def bitwise_xor(tape: Tape, x: Any, y: Any) -> Scalar:
    a, b = _operand(tape, x), _operand(tape, y)
    if are_conditions(a, b):
        return exclusive_or(tape, a, b)
    return _without(tape, mul(tape, _common(tape, "^", a, b), integer(tape, 2)), a, b)


@operation("bitwise_not", "invert")
def bitwise_not(tape: Tape, x: Any) -> Scalar:
    found = scalar(tape, x)
    return invert(tape, found) if found.kind == "bool" else sub(tape, integer(tape, -1), found)


@operation("bitwise_left_shift", "lshift")
def left_shift(tape: Tape, x: Any, y: Any) -> Scalar:
    if isinstance(y, int):
        return mul(tape, x, _power_of_two(y))
    return _shift(tape, x, y, mul)


@operation("bitwise_right_shift", "rshift")
def right_shift(tape: Tape, x: Any, y: Any) -> Scalar:
    if isinstance(y, int):
        return floor_divide(tape, x, _power_of_two(y))
    return _shift(tape, x, y, floor_divide)


def _power_of_two(bits: int) -> int:
    if not 0 <= bits < _BITS - 1:
        raise refuse("E0901", f"a shift by {bits}", f"expected 0 to {_BITS - 2}")
    return 1 << int(bits)


def _shift(tape: Tape, x: Any, y: Any, step: Any) -> Scalar:
    """Returns x shifted by a value of the mod from 0 to 31, by the powers of two that its bits say."""
    found, by = number(tape, x), number(tape, y)
    if "float" in (found.kind, by.kind):
        raise refuse("E0901", "a shift of floats cannot be written in a spec", "floats have no bits here")
    for place in range(_BITS.bit_length() - 1):
        found = where(tape, _bit(tape, by, place), step(tape, found, integer(tape, 1 << (1 << place))), found)
    return found


def _operand(tape: Tape, x: Any) -> Scalar:
    """Returns an argument as a scalar; a number of Python's is part of the structure, as its bits are."""
    return integer(tape, x) if isinstance(x, int) and not isinstance(x, bool) else scalar(tape, x)


def _common(tape: Tape, name: str, x: Scalar, y: Scalar) -> Scalar:
    a, b = _wide(tape, x), _wide(tape, y)
    if "float" in (a.kind, b.kind):
        raise refuse("E0901", f"'{name}' of floats cannot be written in a spec", "floats have no bits here")
    for known, other in ((a, b), (b, a)):
        if known.low == known.high:
            return _mask_bits(tape, other, int(known.low))
    most = min((operand.high for operand in (a, b) if operand.low >= 0), default=math.inf)
    if most == math.inf or int(most).bit_length() > _MOST_BITS:
        raise refuse(
            "E0901",
            f"'{name}' of these integers cannot be written in a spec",
            f"neither is known to be one of {_MOST_BITS} bits",
            "take the bits of one first: (flags[b, kv_idx] & 0xff) & other; whole powers of 2 divide by '//'"
            " and leave remainders by '%'",
        )
    found = integer(tape, 0)
    for place in range(int(most).bit_length()):
        both = logical_and(tape, _bit(tape, a, place), _bit(tape, b, place))
        found = add(tape, found, where(tape, both, integer(tape, 1 << place), integer(tape, 0)))
    return Scalar(tape, found.at, 0, most)


def _bit(tape: Tape, x: Scalar, place: int) -> Scalar:
    above = floor_divide(tape, x, integer(tape, 1 << place)) if place else x
    return compare(tape, "!=", remainder(tape, above, integer(tape, 2)), integer(tape, 0))


def _mask_bits(tape: Tape, x: Scalar, mask: int) -> Scalar:
    """Returns the bits of x that are set in a number: run by run, or x without those that are not."""
    if not -(1 << _BITS - 1) <= mask < 1 << _BITS - 1:
        raise refuse("E0901", f"bits of {mask}", f"expected a number of {_BITS} bits")
    if mask < 0:
        return sub(tape, x, _mask_bits(tape, x, ~mask))
    found, first = integer(tape, 0), 0
    while mask >> first:
        length = sum(1 for _ in takewhile(lambda at: mask >> at & 1, count(first)))
        if length:
            shifted = floor_divide(tape, x, integer(tape, 1 << first)) if first else x
            run = remainder(tape, shifted, integer(tape, 1 << length))
            found = add(tape, found, mul(tape, run, integer(tape, 1 << first)) if first else run)
        first += max(length, 1)
    return Scalar(tape, found.at, 0, min(mask, x.high) if x.low >= 0 else mask)


def _without(tape: Tape, common: Scalar, x: Scalar, y: Scalar) -> Scalar:
    """Returns the sum of two integers without the bits that were counted too often. It is no longer than the
    longer of two that are not negative.
    """
    a, b = _wide(tape, x), _wide(tape, y)
    found, most = sub(tape, add(tape, a, b), common), max(a.high, b.high)
    if a.low >= 0 and b.low >= 0 and most < math.inf:
        found = Scalar(tape, found.at, 0, (1 << int(most).bit_length()) - 1)
    return like(tape, found, x, y)


def _wide(tape: Tape, x: Scalar) -> Scalar:
    found = number(tape, x)
    return Scalar(tape, found.at, found.low, found.high)
