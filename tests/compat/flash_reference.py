"""Attention as flash-attention defines it, by plain PyTorch, and the rule that its tests judge by.

The same arithmetic is done twice: in float32, and in the type of the inputs, step by step as an eager model
would. An output may be at most twice as far from the first as the second is, plus what two roundings of a
number near 0.3 cost. No constant of the rule is ours, and it knows nothing of the bound that attnc proves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a call computes. left, right: None for no bound; keep: bool[B, H, M, N] of dropout."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    dropout: float = 0.0
    keep: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meaning: Meaning,
    *,
    lengths: torch.Tensor | None = None,
    leftpad: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    low: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, M, H, Dv], lse [B, H, M]) of q [B, M, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv].

    lengths, rows: keys and queries of each sequence that exist; the last query stands at the last key, and
    queries that do not have o = 0 and an lse of minus infinity.
    leftpad: keys at the start that do not. low: in the type of q, where float32 is the rule.
    """
    dtype = q.dtype
    if not low:
        q, k, v = q.float(), k.float(), v.float()
    (_, m, heads, size), n = q.shape, k.shape[1]
    group = heads // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = size**-0.5 if meaning.scale is None else meaning.scale
    s = torch.einsum("bmhd,bnhd->bhmn", q, k * scale)
    if meaning.softcap > 0:
        s = torch.tanh(s / meaning.softcap) * meaning.softcap
    end_k = _ends(lengths, n, q.device)
    end_q = _ends(rows, m, q.device)
    i = torch.arange(m, device=q.device)[:, None]
    j = torch.arange(n, device=q.device)
    at = i + end_k - end_q
    if meaning.slopes is not None:
        s = s - meaning.slopes.to(s.dtype)[..., None, None] * (at - j).abs()
    hidden = (j >= end_k) | (i >= end_q)
    if meaning.causal:
        hidden = hidden | (j > at)
    if meaning.right is not None:
        hidden = hidden | (j > at + meaning.right)
    if meaning.left is not None:
        hidden = hidden | (j < at - meaning.left)
    if leftpad is not None:
        hidden = hidden | (j < leftpad[:, None, None, None])
    s = s.masked_fill(hidden, -torch.inf)
    if meaning.sink is not None:
        column = meaning.sink.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, column], -1)
    lse = torch.logsumexp(s, -1).masked_fill((i >= end_q)[..., 0], -torch.inf)
    blank = lse.isinf()[..., None]
    p = torch.softmax(s.masked_fill(blank, 0.0), -1).masked_fill(blank, 0.0)[..., :n].to(v.dtype)
    p = p.masked_fill(hidden, 0.0)
    if meaning.keep is not None:
        p = p.masked_fill(~meaning.keep, 0.0) / (1 - meaning.dropout)
    o = torch.einsum("bhmn,bnhd->bmhd", p, v)
    return o.to(dtype), lse.float()


def both(tensors: Any, meaning: Meaning, **more: Any) -> Any:
    """`attend` of (q, k, v) in float32, and in their own type."""
    q, k, v = tensors
    return tuple(attend(q, k, v, meaning, low=low, **more) for low in (False, True))


def judge(
    name: str,
    got: torch.Tensor,
    right: torch.Tensor,
    plain: torch.Tensor,
    rate: float = 2.0,
    *,
    rounding: float = 0.0,
) -> None:
    """AssertionError where `got` is further from the float32 result than the rule allows.

    right: in float32, rounded once; plain: in the type of the inputs; rounding: what is allowed besides, for
    numbers that kernels round and `plain` does not.
    """
    near = right.to(got.dtype)
    slack = 2 * ((near + 0.3 - 0.3) - near).float().nan_to_num(0.0).abs()
    got, right, plain = got.float(), right.float(), plain.float()
    assert got.shape == right.shape, f"{name}: {list(got.shape)} for {list(right.shape)}"
    assert torch.equal(got.isinf(), right.isinf()), f"{name}: infinite at other places"
    finite = ~right.isinf()
    got, right, plain = got[finite], right[finite], plain[finite]
    if not right.numel():
        return
    error, allowed = (got - right).abs().max(), rate * (plain - right).abs().max() + slack.max() + rounding
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _ends(ends: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    if ends is None:
        return torch.tensor(size, device=device)
    return ends[:, None, None, None]
