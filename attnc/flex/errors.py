"""What a mod says that no spec can: a diagnostic with its place in the user's own file."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

import torch

from attnc.api.compile import SpecError
from attnc.diagnostics import error
from attnc.source import Source, Span

_OURS = tuple(f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__))


class FlexError(SpecError):
    """A mod uses what no spec can say. Its text names the operation and quotes its line."""


def refused(code: str, message: str, label: str, hint: str = "", frame: FrameType | None = None) -> FlexError:
    """Returns the error for the operation of the user's that is under way, or that this frame ends in."""
    hints = (hint,) if hint else ()
    return FlexError([error(code, message, _span_of(frame or sys._getframe()), label, hints=hints)])


def _span_of(innermost: FrameType) -> Span:
    """Returns the expression that runs in the innermost frame that is neither attnc.flex nor torch."""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return Source("<mod>", "").span(0, 0)
    code = frame.f_code
    source = Source(
        _relative_path(code.co_filename), "".join(linecache.getlines(code.co_filename, frame.f_globals))
    )
    positions = list(code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if not source.text or first is None or last is None or start is None or end is None:
        return source.span(0, 0)
    # Columns of code objects count bytes of UTF-8.
    return source.span(_offset(source, first, start), _offset(source, last, end))


def _offset(source: Source, line: int, column: int) -> int:
    return source.line_start(line) + len(source.line_text(line).encode()[:column].decode(errors="ignore"))


def _relative_path(path: str) -> str:
    """Returns a path as it is shown: relative where it lies below the current folder, if there is one."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed meanwhile
        return path
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
