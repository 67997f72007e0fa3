"""torch's operations on scalars, as entries of a tape: one function for each, by torch's name. Here are those
that convert and make numbers; `arithmetic`, `logic`, `functions` and `rows` hold the others.

A condition where a number is expected counts as 0 or 1, as in torch. Operations that the language lacks are
composed of those that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from attnc.flex.errors import refused
from attnc.flex.symbols import OPERATIONS, Scalar, scalar
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
