"""Where the user's file has what an error of a generated spec is about."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from attnc.api.compile import SpecError
from attnc.flex.errors import FlexError, defined_at, move_error, span_of, span_of_line
from attnc.flex.spec import CallLayout, shown_entries
from attnc.flex.trace import Trace, trace


def place_error(
    failure: SpecError, traced: Trace, layout: CallLayout, mods: Sequence[Callable[..., Any] | None]
) -> FlexError:
    """Returns an error at the operation of a mod that it is about, or at the call where that is not known.

    The mods are called once more, to see where they have what: that takes longer than to call them.
    """
    tape = traced.tape
    scale = float(tape.numbers[0]) if layout.scaled else None
    again = trace(
        *mods, scale=scale, sizes=tape.sizes, device=tape.device,
        learned=tape.learned, gradients=tape.gradients, is_placed=True,
    )  # fmt: skip
    places = again.tape.places
    assert places is not None
    wanted = failure.shown if isinstance(failure, FlexError) else _quote_place(failure)
    at = _closest(wanted, shown_entries(again, layout, mods, places))
    if at is not None:
        return move_error(failure, places[at])
    defined = next(filter(None, map(defined_at, mods)), None)
    if isinstance(failure, FlexError) and defined is not None:  # it is about a mod as a whole
        return move_error(failure, span_of_line(defined))
    return move_error(failure, span_of(sys._getframe()))


def _quote_place(failure: SpecError) -> str:
    span = failure.diagnostics[0].primary.span
    return span.source.text[span.start : span.end]


def _closest(wanted: str, entries: dict[int, str]) -> int | None:
    """Returns the entry that reads as is wanted, else the least that contains it, else the largest in it."""
    if not wanted:
        return None
    ranked = sorted(entries, key=lambda at: len(entries[at]))
    for at in ranked:
        if wanted in entries[at]:
            return at
    within = [at for at in ranked if len(entries[at]) > 1 and entries[at] in wanted]
    return within[-1] if within else None
