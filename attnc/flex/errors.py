"""What a mod says that no spec can: a diagnostic with its place in the user's own file."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch

from attnc.api.compile import SpecError
from attnc.diagnostics import Label, error
from attnc.source import Source, Span

_OURS = tuple(f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__))


#: A file and the number of a line.
Place: TypeAlias = tuple[str, int]


class FlexError(SpecError):
    """A mod uses what no spec can say. Its text names the operation and quotes its line.

    shown: the expression that it is about, as a spec has it, where the line is not known yet
    """

    shown = ""

    def __repr__(self) -> str:
        return str(self)


def move_error(failure: SpecError, span: Span) -> FlexError:
    """Returns an error at another place: in the user's file instead of in the text of a spec."""
    return FlexError(
        [replace(found, primary=Label(span, found.primary.text), related=()) for found in failure.diagnostics]
    )


def defined_at(mod: Any) -> Place | None:
    """Returns where a mod is defined, if it is a function."""
    code = getattr(mod, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def span_of_line(place: Place) -> Span:
    path, line = place
    source = Source(_relative_path(path), "".join(linecache.getlines(path)))
    if not source.text:
        return source.span(0, 0)
    text = source.line_text(line)
    start = source.line_start(line) + len(text) - len(text.lstrip())
    return source.span(start, source.line_start(line) + len(text))


def refuse(code: str, message: str, label: str, hint: str = "", frame: FrameType | None = None) -> FlexError:
    """Returns the error for the operation of the user's that is under way, or that this frame ends in."""
    hints = (hint,) if hint else ()
    return FlexError([error(code, message, span_of(frame or sys._getframe()), label, hints=hints)])


def refused_branch() -> FlexError:
    """Returns the error for a mod that branches on a value."""
    return refuse(
        "E0902",
        "a mod cannot branch on its values",
        "decided while the mod is read, when there are no values yet",
        "write torch.where(condition, a, b); for conditions & | ~ instead of and, or, not; torch.minimum"
        " and torch.maximum instead of min and max",
    )


def refused_number() -> FlexError:
    """Returns the error for a mod that asks for the number that a value is."""
    return refuse(
        "E0902",
        "a value of a mod is not a Python number",
        "asks for a number while the mod is read, when there is none yet",
        "compute with torch's functions and operators, on torch's tensors",
    )


def span_of(innermost: FrameType) -> Span:
    """Returns the expression that runs in the innermost frame, from this one outwards, that is neither
    attnc.flex nor torch.
    """
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return Source("<mod>", "").span(0, 0)
    code = frame.f_code
    text = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    source = _source_of(_relative_path(code.co_filename), text)
    positions = list(code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if not source.text or first is None or last is None or start is None or end is None:
        return source.span(0, 0)
    # Columns of code objects count bytes of UTF-8.
    return source.span(_offset(source, first, start), _offset(source, last, end))


@lru_cache(maxsize=8)
def _source_of(path: str, text: str) -> Source:
    """Returns the source of a file: one for all operations, which finds its lines once."""
    return Source(path, text)


def _offset(source: Source, line: int, column: int) -> int:
    return source.line_start(line) + len(source.line_text(line).encode()[:column].decode(errors="ignore"))


def _relative_path(path: str) -> str:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed meanwhile
        return path
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
