"""Runs of elements that are copied, or added up: what messages between ranks are packed and opened with, in
one launch instead of one for each run of rows.

A unit is so many elements that lie side by side in each tensor. A `Recipe` says of each unit of a result
which units of which tensors it is the sum of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

#: Tensors that a recipe may take units of.
SOURCES = 4
#: Bytes that a thread copies at once, and elements that a program of the kernel does.
_VECTOR, _TILE = 16, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """unit: elements of one; step: elements that all offsets are multiples of; at: i64[terms, units], where a
    unit begins in which source, as `offset / step * SOURCES + source`, or -1 for zeros; into: i64[units],
    where each begins in the result, in steps, or None where they follow each other.
    """

    unit: int
    at: torch.Tensor
    into: torch.Tensor | None
    step: int

    @staticmethod
    def of(
        unit: int,
        terms: Sequence[Sequence[tuple[Ints | int, Ints]]],
        wide: int,
        device: torch.device,
        into: Ints | None = None,
    ) -> Recipe:
        """terms: in the order in which they are added, for the units of the result the source and the offset,
        -1 for none, a part of the units at a time; wide: bytes of an element.
        """
        every = [x for term in terms for _, x in term] + ([] if into is None else [into])
        step = gcd(
            unit, max(_VECTOR // wide, 1), *(int(np.gcd.reduce(np.maximum(x, 0), axis=None)) for x in every)
        )

        def move_indices(parts: Sequence[Ints]) -> torch.Tensor:
            flat = [x.ravel() for x in parts] or [np.zeros(0, np.int64)]
            return torch.from_numpy(np.concatenate(flat)).to(device)

        at = [
            move_indices([np.where(x < 0, -1, x // step * SOURCES + source) for source, x in term])
            for term in terms
        ]
        return Recipe(unit, torch.stack(at), None if into is None else move_indices([into // step]), step)


def collect(out: torch.Tensor, recipe: Recipe, *sources: torch.Tensor) -> torch.Tensor:
    """Writes the units of a recipe into `out`, and returns it. Sources have one dtype. Sums are made in f32,
    in the order of the terms, and rounded once.
    """
    if recipe.at.shape[1]:
        (_collect_by_kernel if out.is_cuda else _collect_by_index)(out, recipe, sources)
    return out


def _collect_by_index(out: torch.Tensor, recipe: Recipe, sources: Sequence[torch.Tensor]) -> None:
    within, total = torch.arange(recipe.unit, device=out.device), None
    flat = [_all_of(x) for x in sources]
    for at in recipe.at:
        some = torch.zeros(len(at), recipe.unit, dtype=sources[0].dtype, device=out.device)
        for source, x in enumerate(flat):
            mine = ((at >= 0) & (at % SOURCES == source)).nonzero().flatten()
            some[mine] = x[(at[mine] // SOURCES * recipe.step)[:, None] + within]
        total = some if total is None else total.float() + some.float()
    assert total is not None
    places = torch.arange(len(total), device=out.device)
    into = places * recipe.unit if recipe.into is None else recipe.into * recipe.step
    _all_of(out)[into[:, None] + within] = total.to(out.dtype)


def _all_of(x: torch.Tensor) -> torch.Tensor:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1 if x.numel() else 0,), (1,))


def _collect_by_kernel(out: torch.Tensor, recipe: Recipe, sources: Sequence[torch.Tensor]) -> None:
    from attnc.runtime.units_kernel import launch  # Triton

    every = (*sources, *(sources[0] for _ in range(SOURCES - len(sources))))
    launch(out, recipe.at, recipe.into, recipe.unit, recipe.step, every, _TILE)
