"""Schedules that attnc has added to a program: what is said of them is moved to their attentions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.model.program import Program
from attnc.source import Span

#: The head of a schedule that attnc writes.
_ADDED = re.compile(r"^schedule (\w+) for (\S+)", re.MULTILINE)


@contextmanager
def in_what_is_written(program: Program, written: int | None) -> Iterator[None]:
    """Moves what the block says of schedules that attnc has added to their attentions. written: where the
    user's text ends, None if nothing was added.
    """
    try:
        yield
    except DiagnosticError as failure:
        raise DiagnosticError(move_to_attentions(failure.diagnostics, program, written)) from None


def move_to_attentions(
    found: Iterable[Diagnostic], program: Program, written: int | None
) -> tuple[Diagnostic, ...]:
    if written is None:
        return tuple(found)
    return tuple(dict.fromkeys(_move(one, program, written) for one in found))


def _move(found: Diagnostic, program: Program, written: int) -> Diagnostic:
    head = _head_of(found.primary.span, written)
    if head is None:
        return found
    name, target = head.groups()
    place = program.attention(name).span or program.source.span(0, 0)
    note = f"'{name}' has no schedule; this is of the one that attnc gives it for {target}"
    related = tuple(label for label in found.related if _head_of(label.span, written) is None)
    return replace(
        found, primary=replace(found.primary, span=place), related=related, notes=(*found.notes, note)
    )


def _head_of(span: Span, written: int) -> re.Match[str] | None:
    """Returns the head of the added schedule that a place is in; None for what the user wrote, and for
    another source, such as the prelude.
    """
    heads = [head for head in _ADDED.finditer(span.source.text, written) if head.start() <= span.start]
    return heads[-1] if heads else None
