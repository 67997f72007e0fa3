"""Tensors that a callable takes, lying otherwise in memory; and what it returns, compared."""

from __future__ import annotations

from typing import Any

import torch


def spread(x: torch.Tensor) -> torch.Tensor:
    """Returns the same elements with larger strides."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Returns the same elements one further on: no longer aligned to 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def results(found: Any) -> tuple[torch.Tensor, ...]:
    """Returns what a callable returned, one tensor or several."""
    return found if isinstance(found, tuple) else (found,)


def same(left: Any, right: Any) -> bool:
    """Returns whether two calls returned the same."""
    return all(torch.equal(a, b) for a, b in zip(results(left), results(right), strict=True))
