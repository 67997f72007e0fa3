"""Steps of `recorder` as a text, and as mods again."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnc.flex.errors import refused
from attnc.flex.recorder import Reference, Steps
from attnc.flex.symbols import OPERATIONS, apply, tape_of


@dataclass(frozen=True, slots=True)
class Program:
    """A call of `flex_attention` but for its tensors and numbers.

    score, mask: the steps of the mods; scaled: whether the first float is the scale
    order: which axis of o is outer, "rows" or "heads"; lse, wanted, target: of `spec.Layout`
    """

    score: Steps | None
    mask: Steps | None
    scaled: bool
    order: str
    lse: bool
    wanted: tuple[tuple[str, int], ...]
    target: str


def written(*fields: Any) -> str:
    """The fields of a program as a text, which graphs can hold and other processes can read."""
    return repr(_plain(fields))


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


@functools.cache
def read(program: str) -> Program:
    """The program of a text."""
    return Program(*_valued(ast.literal_eval(program)))


def mod_of(
    steps: Steps | None, tensors: Sequence[torch.Tensor], floats: Sequence[float], integers: Sequence[int]
) -> Callable[..., Any] | None:
    """The mod that does these steps."""
    if steps is None:
        return None
    todo, returned = steps
    lists = {"tensor": tensors, "float": floats, "integer": integers}

    def mod(*symbols: Any) -> Any:
        results: list[Any] = []

        def value(reference: Reference) -> Any:
            kind, what = reference
            if kind == "constant":
                return what
            if kind == "several":
                return tuple(value(part) for part in what)
            if kind == "symbol":
                return symbols[what]
            return results[what] if kind == "step" else lists[kind][what]

        for name, args, kwargs in todo:
            results.append(_done(name, [value(x) for x in args], {key: value(x) for key, x in kwargs}))
        return value(returned)

    return mod


def _done(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a step."""
    if name == "__getitem__":
        return args[0][args[1]]
    tape = tape_of((*args, *kwargs.values()))
    if tape is None:  # such as the filling of a tensor, which needs no symbol
        function = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
        return getattr(args[0], name)(*args[1:], **kwargs) if function is None else function(*args, **kwargs)
    name = _SPELLED.get(name, name)
    of_python = getattr(operator, name, None)
    if of_python is not None and name not in OPERATIONS:
        return of_python(*args)
    if name.startswith("__"):  # an operator the other way round
        return getattr(args[0], name)(*args[1:])
    return apply(tape, name, tuple(args), kwargs)


#: Names that torch has and Python has no more.
_SPELLED = {"__div__": "__truediv__", "__rdiv__": "__rtruediv__", "__idiv__": "__truediv__"}


def _plain(value: Any) -> Any:
    """With what has no literal spelled."""
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": ""}
    if value is Ellipsis:
        return {"ellipsis": ""}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise refused("E0903", f"a {type(value).__name__} in a mod", "expected a number or a tensor")


def _valued(value: Any) -> Any:
    match value:
        case tuple():
            return tuple(_valued(part) for part in value)
        case {"dtype": str(name)}:
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
        case {"slice": _}:
            return slice(None)
        case {"ellipsis": _}:
            return Ellipsis
    return value
