"""Where parts of shared memory, and barriers, begin in the text of a kernel: each behind the one before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Places:
    """at: where each part begins, as C++; end: what follows the last one."""

    at: Mapping[str, str]
    end: str


def lay_out(start: str, parts: Iterable[tuple[str, str, object]]) -> Places:
    """Returns the places of the parts that a kernel has. parts: names, where they end, whether they exist."""
    at = {}
    for name, end, exists in parts:
        if exists:
            at[name], start = start, end
    return Places(at, start)
