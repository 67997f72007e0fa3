"""How many tiles of rows give up a unified maximum: the counter that bounds are tuned by, against the scores.

With all keys in one split, a program does its rows again exactly when the largest exponent of one of them is
outside the bounds. A row that sees no key has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from attnc.plan import ir
from attnc.plan.ir.kernel import UnifiedMax
from attnc.plan.softmax import LOG2E
from attnc.reference import heads
from attnc.reference_arrays import to_arrays
from attnc.verify.case import Case
from attnc.verify.problem import Value, build
from attnc.verify.storage import lengths_for
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject

#: Rows that see different numbers of keys, and rows that may see none.
_SIZES = ((5, 7), (9, 5))
#: Within the bounds of most plans, below them, and above.
_LOGITS = ("random", "low", "huge")
#: How far from a bound an exponent must be, in parts of it, for a program to be sure of the side.
_MARGIN = 2.0**-7


def fallback_violations(subject: Subject) -> Iterator[str]:
    """`fallbacks: what is wrong` of the counter; none for a module without one."""
    kernel = None if subject.plan is None else subject.plan.kernel
    if not isinstance(kernel, ir.Decode) or kernel.unified is None or not kernel.unified.fallback:
        return
    config = next((c for c in subject.configs if getattr(c, "splits", 1) == 0), subject.configs[0])
    if hasattr(config, "split_size"):
        return
    if hasattr(config, "splits"):
        config = config._replace(splits=1)
    attention = subject.variant.attention
    lengths = "full" if "full" in lengths_for(attention) else "drawn"
    for rows, keys in _SIZES:
        few = {"M": rows, "N": keys, "B": 2, "H": 2, "Hkv": 2, "G": 3}
        dims = {name: few.get(name, 16) for name in free_dims(attention)}
        for logits in _LOGITS:
            inputs = build(
                attention, Case(dims=dims, logits=logits, lengths=lengths), device=subject.device
            ).inputs
            counter = torch.zeros(1, dtype=torch.int32, device=subject.device)
            with torch.no_grad():
                subject.function(*inputs.values(), config=config, fallbacks=counter)
            found, (least, most) = counter.item(), _tiles(subject, kernel, config.BLOCK_M, inputs)
            if not least <= found <= most:
                expected = least if least == most else f"{least} to {most}"
                yield f"fallbacks: {found} are counted of {logits} scores, expected {expected}"


def _tiles(subject: Subject, kernel: ir.Decode, block_m: int, inputs: Mapping[str, Value]) -> tuple[int, int]:
    """Tiles of rows in which some row is surely outside the bounds, and those in which one may be."""
    attention, unified = subject.variant.attention, kernel.unified
    assert unified is not None
    sure: set[tuple[int, int, int]] = set()
    possible: set[tuple[int, int, int]] = set()
    for head in heads(attention, to_arrays(attention, inputs)):
        group = 1 if kernel.pack is None else head.dims["H"] // head.dims["Hkv"]
        highest = head.scores.max(axis=1, initial=-np.inf) * LOG2E - unified.phi
        for row, exponent in enumerate(highest):
            place = (head.first + row) * group + head.h % group
            tile = (head.b, head.h // group, place // block_m)
            if exponent > -np.inf and _is_outside(unified, exponent, -_MARGIN):
                possible.add(tile)
                if _is_outside(unified, exponent, _MARGIN):
                    sure.add(tile)
    return len(sure), len(possible)


def _is_outside(unified: UnifiedMax, exponent: float, margin: float) -> bool:
    """Whether it is, by as much as this part of itself."""
    by = margin * abs(exponent)
    return exponent > unified.high + by or exponent < unified.low - by
