"""torch's own FlexAttention, evaluated eagerly in float64: what ours must compute."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as torch_module
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

#: The module is hidden behind the operator of its name.
permute_strides: Callable[..., torch.Tensor] = sys.modules[
    "torch._higher_order_ops.flex_attention"
]._permute_strides
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


def compare_strides(o: torch.Tensor, query: torch.Tensor) -> None:
    """Holds the strides of a result to those of torch's, but of axes of one element."""
    wanted = permute_strides(torch.empty(o.shape), query.stride()).stride()
    for size, ours, theirs in zip(o.shape, o.stride(), wanted, strict=True):
        assert size == 1 or ours == theirs, (o.shape, query.stride(), o.stride(), wanted)


def dense_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    learned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns o, lse and the largest scores in float64, by torch's own way to call mods for all pairs, with a
    graph for query, key and value; learned: with all positions at once, and a graph for captured tensors.
    """
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    score = q @ k.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    positions = [torch.arange(size, device=score.device) for size in score.shape]
    kept = torch.ones_like(score, dtype=torch.bool)
    every: Callable[..., Any] = _vmap_for_bhqkv
    if learned:
        positions = list(torch.meshgrid(*positions, indexing="ij"))
        every = _at_once
    with TransformGetItemToIndex() if not learned else nullcontext():
        if mask_mod is not None:
            kept = every(mask_mod, prefix=())(*positions).expand_as(score)
        if score_mod is not None:
            score = every(score_mod, prefix=(0,))(score, *positions).double().expand_as(score)
    kept = kept & ~score.isneginf()
    lse = score.masked_fill(~kept, -torch.inf).logsumexp(-1)
    largest = score.masked_fill(~kept, -torch.inf).amax(-1)
    p = torch.where(kept, score - lse.masked_fill(lse.isneginf(), 0.0)[..., None], -torch.inf).exp()
    return p @ v, lse, largest


def _at_once(mod: Callable[..., Any], prefix: tuple[int, ...]) -> Callable[..., Any]:
    return mod


def gradients(
    found: torch.Tensor, of: Sequence[torch.Tensor], like: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a sum of the elements with fixed random weights: `cotangent(like or found)`."""
    weights = cotangent(found if like is None else like).to(found)
    return torch.autograd.grad(found, list(of), weights, allow_unused=True)


def cotangent(like: torch.Tensor) -> torch.Tensor:
    """Fixed random weights of the shape and type of a tensor."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(3)).to(like)
