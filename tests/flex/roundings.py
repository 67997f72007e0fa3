"""How far may the gradient of a learned tensor lie from float64's, by the terms that it is the sum of.

A kernel adds p_ij (dp_ij - delta_i) ds_ij/dx over all pairs (i, j), where dp_ij = do_i . v_j,
delta_i = do_i . o_i, and s is the score that the mods give. Terms may cancel, to nothing for what shifts all
scores of a row alike, and what they leave says nothing of their roundings. So the bound is of the terms:

- each is rounded in float32, in proportion to its parts, p_ij (|do_i| . |v_j| + |do_i| . |o_i|): `_PAIRS`
  roundings of each, at worst all of one sign;
- o is rounded to its own type, and p before it is multiplied by v: an error e_i of delta_i, independent from
  row to row, which all terms of a row share. `_ROWS` standard deviations of what it makes of the sum.

Both sums are estimated from a few random ones, by autograd: sum_k z_k t_k with normal z has the variance
sum_k t_k^2. `attnc.verify.gradient_bound` argues likewise, and exactly, for specs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

Mod: TypeAlias = "Callable[..., Any] | None"

_PAIRS, _ROWS, _DRAWS = 16, 6, 12


class Dense:
    """A call in float64, pair by pair of queries and keys; score has the graph of what is learned."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Mod, mask_mod: Mod
    ) -> None:
        (B, H, M, D), N = q.shape, k.shape[2]
        positions = [torch.arange(size, device=q.device) for size in (B, H, M, N)]
        q, k, self.v = (x.detach().double() for x in (q, k, v))
        score = q @ k.mT / math.sqrt(D)
        with TransformGetItemToIndex():
            if score_mod is not None:
                score = _vmap_for_bhqkv(score_mod, prefix=(0,))(score, *positions).double()
            kept = torch.ones_like(score, dtype=torch.bool)
            if mask_mod:
                kept = _vmap_for_bhqkv(mask_mod, prefix=())(*positions).expand_as(score)
        self.score = score
        p = torch.softmax(score.detach().masked_fill(~kept, -math.inf), -1)
        self.p = torch.where(kept, p, 0.0).nan_to_num()
        self.o = self.p @ self.v
        self.kept = kept

    def largest_score(self) -> float:
        """The largest magnitude of the finite scores that the mask keeps; 0 where there is none."""
        score = self.score.detach()
        return float(score.masked_fill(~self.kept | score.isinf(), 0.0).abs().max())

    def sums(self, cotangent: torch.Tensor, of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """sum_ij cotangent_ij ds_ij/dx for each x, in float64."""
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            self.score, list(of), cotangent, retain_graph=True, allow_unused=True
        )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(of, found, strict=True)]


def allowed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Mod,
    mask_mod: Mod,
    do: torch.Tensor,
    of: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The bound on |gradient - float64's| of each element of the learned tensors. do: the cotangent of o."""
    if not of:
        return []
    dense, do = Dense(q, k, v, score_mod, mask_mod), do.double()
    if not dense.score.requires_grad:
        return [torch.zeros_like(x) for x in of]
    size = do.abs() @ dense.v.abs().mT + (do.abs() * dense.o.abs()).sum(-1, keepdim=True)
    terms = dense.p * size
    own = 0.5 * torch.finfo(q.dtype).eps
    deviation = own * (do.square() * (dense.o.square() + dense.p.square() @ dense.v.square())).sum(-1).sqrt()
    generator = torch.Generator().manual_seed(5)

    def spread(made: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The standard deviation of random sums, of which `made` gives the terms' factors."""
        draws = [dense.sums(made(), of) for _ in range(_DRAWS)]
        return [torch.stack([x.square() for x in xs]).mean(0).sqrt() for xs in zip(*draws, strict=True)]

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(q.device)

    pairs = spread(lambda: terms * normal(terms.shape))
    rows = spread(lambda: dense.p * (deviation * normal(deviation.shape))[..., None])
    worst = _PAIRS * 0.5 * torch.finfo(torch.float32).eps * math.sqrt(int((dense.p > 0).sum()))
    return [worst * a + _ROWS * b for a, b in zip(pairs, rows, strict=True)]
