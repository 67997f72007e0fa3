"""Attention of one sequence in float64, in the terms of the engines: what adapters must compute."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    left: int = -1,
    causal: bool = True,
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [M, Hq, D], lse [M, Hq] in base e) of q [M, Hq, D] against k, v [N, Hkv, D].

    The last query stands at the last key. left: keys before a query's own that it sees, -1 for all.
    bias, tree: [M, M], of new tokens i and j: what is added to their score; whether i sees j, not causal.
    seen: bool[M, N], in the place of causal; added: [Hq, M, N], to scores.
    """
    m, heads, _ = q.shape
    n, group = len(k), heads // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q.double(), k) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(m)[:, None] + n - m - torch.arange(n)[None, :]
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * distance
    if bias is not None:
        s[:, :, n - m :] += bias.double()
    if added is not None:
        s = s + added.double()
    hidden = torch.zeros(m, n, dtype=torch.bool)
    if seen is not None:
        hidden |= ~seen
    elif tree is not None:
        hidden[:, n - m :] = ~tree
    elif causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    s = s.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(heads, m, 1)], 2)
        v = torch.cat([v, torch.zeros(1, heads, v.shape[-1], dtype=v.dtype)], 0)
    lse = torch.logsumexp(s, 2)
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return torch.einsum("hmn,nhd->mhd", p, v), lse.mT


def pages(
    lengths: list[int], page: int, heads: int, size: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(k, v: f32[pages, page, heads, size], block_table, keys, values): sequences in pages in a random order.

    Rows without a token are NaN, and table entries without a page are far outside.
    """
    torch.manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    k, v = torch.full((2, sum(counts) + 2, page, heads, size), torch.nan)
    table = torch.full((len(lengths), max(counts, default=0) + 1), 1 << 20, dtype=torch.int32)
    order = torch.randperm(len(k)).tolist()
    keys, values = ([torch.randn(length, heads, size) for length in lengths] for _ in range(2))
    for b, count in enumerate(counts):
        for column in range(count):
            number = order.pop()
            table[b, column] = number
            for pool, rows in ((k, keys[b]), (v, values[b])):
                part = rows[column * page : (column + 1) * page]
                pool[number, : len(part)] = part
    return k, v, table, keys, values
