"""Mods -> tape: each is called once with symbols for the score and the positions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias

import torch

import attnc.flex.bits
import attnc.flex.functions  # noqa: F401 - with it the functions that a mod looks up by name
from attnc.api.tensors import to_float
from attnc.diagnostics.shown import show_value
from attnc.flex import operations
from attnc.flex.errors import FlexError, defined_at, move_error, refuse, span_of_line
from attnc.flex.symbols import Recording, Scalar, scalar
from attnc.flex.tape import Sizes, Tape
from attnc.source import Span

ScoreMod: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod: TypeAlias = Callable[[Any, Any, Any, Any], Any]

_POSITIONS = {"b": "B", "h": "H", "q_idx": "M", "kv_idx": "N"}


@dataclass(frozen=True, slots=True)
class Trace:
    """The tape of a score_mod and a mask_mod, with the entries that they return: a float, and a condition.
    listed: a condition on the blocks of a BlockMask, which says nothing more than the mask, but what tiles
    a kernel need not visit.
    """

    tape: Tape
    score: int
    mask: int
    listed: int | None = None


def trace(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    *,
    scale: float | None = None,
    sizes: Sizes,
    device: torch.device,
    infers: bool = False,
    learned: Collection[int] = (),
    gradients: bool = False,
    is_placed: bool = False,
) -> Trace:
    """Calls the mods. FlexError for what no spec can say; whatever else they raise is theirs.

    scale: the first number of the tape, unless it is None; sizes, infers, learned, gradients: of `Tape`;
    is_placed: whether it says where the mods have each entry.
    """
    places: dict[int, Span] | None = {} if is_placed else None
    tape = Tape(dict(sizes), device, infers, learned=set(learned), gradients=gradients, places=places)
    if scale is not None:
        tape.number(_finite(scale))
    positions = [
        Scalar(tape, tape.add("int", "index", name), 0, sizes.get(size, math.inf) - 1)
        for name, size in _POSITIONS.items()
    ]
    score = Scalar(tape, tape.add("float", "score"))
    mask = scalar(tape, True)
    has_mods = score_mod is not None or mask_mod is not None
    try:
        with Recording(tape) if has_mods else nullcontext(), _no_functions_of_autograd():
            if score_mod is not None:
                score = operations.real(tape, _call_mod("score_mod", score_mod, score, *positions))
            if mask_mod is not None:
                mask = scalar(tape, _call_mod("mask_mod", mask_mod, *positions))
    except FlexError as failure:  # its text has the place; how symbols came there is of no use to the caller
        raise failure.with_traceback(None) from failure.__cause__
    tape.look_at_order()
    if mask.kind != "bool":
        no_condition = refuse(
            "E0903", f"mask_mod returned {_A[mask.kind]}", "expected a condition", "compare it: > 0"
        )
        raise _at_definition(no_condition, mask_mod)
    return Trace(tape, score.at, mask.at)


@contextmanager
def _no_functions_of_autograd() -> Iterator[None]:
    """Refuses derivatives of the user's own within, which are no part of a spec: the error says so instead of
    what torch says.
    """
    try:
        yield
    except FlexError:
        raise
    except Exception as failure:
        frames = [frame for frame, _ in walk_tb(failure.__traceback__)]
        if not any(frame.f_code.co_filename.endswith(_FUNCTION) for frame in frames):
            raise
        raise refuse(
            "E0901",
            "a torch.autograd.Function cannot be written in a spec",
            "its derivative is its own",
            "write what it computes: the derivative follows from that",
            frame=frames[-1],
        ) from failure


def _finite(scale: float) -> float:
    found = to_float("scale", scale)
    if not math.isfinite(found):
        raise ValueError(f"scale: expected a finite number, got {show_value(scale)}")
    return found


_FUNCTION = str(Path("torch", "autograd", "function.py"))
_A = {"int": "an integer", "float": "a float"}


def _call_mod(what: str, mod: Callable[..., Any], *given: Scalar) -> Any:
    if not callable(mod):
        raise TypeError(f"{what}: expected a function, got {show_value(mod)}")
    try:
        returned = mod(*given)
    except TypeError:
        parameters = _signature(mod)
        try:
            parameters.bind(*given)
        except TypeError:
            names = ("score", *_POSITIONS)[-len(given) :]
            raise TypeError(
                f"{what}: expected a function of ({', '.join(names)}), got {_name(mod)}{parameters}"
            ) from None
        raise
    if isinstance(returned, Scalar) or (isinstance(returned, torch.Tensor) and returned.dim() == 0):
        return returned
    shown = f"shape {list(returned.shape)}" if hasattr(returned, "shape") else type(returned).__name__
    hint = ""
    if isinstance(returned, bool | int | float):
        hint = "torch takes no values of Python's: write torch.ones_like(b, dtype=torch.bool) for True"
    failure = refuse(
        "E0903",
        f"{what} {_name(mod)} returned a value of {shown}",
        "expected a single number or condition",
        hint,
    )
    raise _at_definition(failure, mod)


def _at_definition(failure: FlexError, mod: Any) -> FlexError:
    place = defined_at(mod)
    return failure if place is None else move_error(failure, span_of_line(place))


def _name(mod: Callable[..., Any]) -> str:
    name: str = getattr(mod, "__qualname__", type(mod).__name__)
    return name


def _signature(mod: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(mod)
    except ValueError:
        return inspect.signature(lambda *given: None)


__all__ = ["FlexError", "MaskMod", "ScoreMod", "Trace", "trace"]
