"""torch's own FlexAttention, evaluated eagerly in float64: what ours must compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import flex_attention as torch_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

_EAGER = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


def torch_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    *,
    learned: bool = False,
    **options: Any,
) -> Any:
    """The same call of torch's function, on float64. learned: whether captured tensors get gradients, which
    needs its slow way.
    """
    block_mask = None
    if mask_mod is not None:
        B, H, M, _ = query.shape
        block_mask = create_block_mask(mask_mod, B, H, M, key.shape[2], device=str(query.device))
    with warnings.catch_warnings(), patch.object(torch_module, _EAGER, not learned):
        warnings.simplefilter("ignore")  # that it is not compiled
        return torch_flex_attention(
            query.double(), key.double(), value.double(), score_mod, block_mask, **options
        )


def gradients(
    found: torch.Tensor, of: Sequence[torch.Tensor], like: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a sum of the elements with fixed random weights: `cotangent(like or found)`."""
    weights = cotangent(found if like is None else like).to(found)
    return torch.autograd.grad(found, list(of), weights, allow_unused=True)


def cotangent(like: torch.Tensor) -> torch.Tensor:
    """Fixed random weights of the shape and type of a tensor."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(3)).to(like)
