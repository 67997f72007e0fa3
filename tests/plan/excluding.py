"""Masks that exclude keys, planned."""

from __future__ import annotations

from attnc.plan import ir
from tests.plan.planning import planned

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


def kernel(mask: str, target: str = "triton") -> ir.Kernel:
    return planned(mask, inputs=inputs(mask), target=target).kernel
