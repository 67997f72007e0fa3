"""Masks that exclude keys, planned."""

from __future__ import annotations

INPUTS = (
    "first: i32[B]",
    "end: i32[B]",
    "reach: i32[H]",
    "valid: bool[B, N]",
    "doc: i32[B, N] is sorted",
    "sorted: i32[N] is sorted",
)


def inputs(mask: str) -> tuple[str, ...]:
    return tuple(line for line in INPUTS if f"{line.split(':')[0]}[" in mask)
