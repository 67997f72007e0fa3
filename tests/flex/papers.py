"""Mods that papers are known for: what they train on, draft, pack, or bias scores by."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import or_masks

from tests.flex.cases import Mod, Setting, mask, score


@mask
def block_diffusion(s: Setting) -> Mod:
    """BD3-LM (arXiv 2503.09573): a noised copy of the tokens, then a clean one, both in blocks."""
    length, block = s.S // 2, 6

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        of_q, of_kv = q % length // block, kv % length // block
        noised, from_noised = q < length, kv < length
        own = (of_q == of_kv) & (noised == from_noised)
        earlier = (of_q > of_kv) & noised & ~from_noised
        return own | earlier | ((of_q >= of_kv) & ~noised & ~from_noised)

    return mod


@mask
def global_tokens_and_window(s: Setting) -> Mod:
    """Longformer (arXiv 2004.05150): marked tokens see all and are seen by all."""
    marked = torch.zeros(s.S, device=s.device, dtype=torch.bool)
    marked[0] = marked[17] = True
    return or_masks(lambda b, h, q, kv: (q - kv).abs() <= 4, lambda b, h, q, kv: marked[q] | marked[kv])


@mask
def tree_of_drafts_by_ancestors(s: Setting) -> Mod:
    """JetSpec (arXiv 2606.18394): drafts behind a prefix see it and their ancestors, which a matrix tells."""
    nodes = 20
    prefix = s.S - nodes
    parents = [0, *((node - 1) // 2 for node in range(1, nodes))]
    ancestor = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestor[node] |= ancestor[parents[node]]
    ancestor = ancestor.to(s.device)

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        row, column = (x.clamp(min=0, max=nodes - 1) for x in (q, kv - prefix))
        return (kv < prefix) | ((kv < prefix + nodes) & ancestor[row, column])

    return mod


@mask
def blocks_behind_a_prefix(s: Setting) -> Mod:
    """The same paper's training: each block sees the prefix and itself, causally."""
    prefix, block = 12, 6

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        behind = kv - prefix
        own = (kv >= prefix) & (q // block == behind // block) & (behind % block <= q % block)
        return (kv < prefix) | own

    return mod


@mask
def answers_to_shared_prompts(s: Setting) -> Mod:
    """Packed prompts, each followed by its answers, which see the prompt and themselves, causally."""
    starts = [at * s.S // 48 for at in (0, 10, 16, 24, 32, 40, 48)]
    offsets, prompt = s.ints(starts), s.ints([0, 0, 0, 3, 3, 3])
    document = torch.repeat_interleave(torch.arange(6, device=s.device), offsets.diff()).int()

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        own, first = document[q], prompt[document[q]]
        causal = (kv >= offsets[own]) & (q >= kv)
        return causal | ((own != first) & (kv >= offsets[first]) & (kv < offsets[first + 1]))

    return mod


def _chosen_tiles(s: Setting, tile: int, count: int) -> torch.Tensor:
    """Tiles of keys that each tile of queries sees: i32[B, H, tiles, count]."""
    tiles = -(-s.S // tile)
    order = s.floats(s.B, s.H, tiles, tiles).argsort(-1)[..., :count]
    return order.sort(-1).values.int()


@mask
def listed_tiles(s: Setting) -> Mod:
    """Video sparse attention: each tile of queries has a list of tiles of keys; the last tile is not full."""
    tile = 8
    chosen, full = _chosen_tiles(s, tile, 3), torch.full((-(-s.S // tile),), tile, device=s.device)
    full[-1] = 5

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        listed = (chosen[b, h, q // tile] == (kv // tile).unsqueeze(-1)).any(dim=-1)
        return listed & (kv % tile < full[kv // tile])

    return mod


@mask
def map_of_tiles(s: Setting) -> Mod:
    """The same by a matrix of tiles."""
    tile = 8
    chosen = _chosen_tiles(s, tile, 3)
    tiles = chosen.shape[2]
    seen = torch.zeros(s.B, s.H, tiles, tiles, device=s.device, dtype=torch.bool)
    seen.scatter_(-1, chosen.long(), True)
    return lambda b, h, q, kv: seen[b, h, q // tile, kv // tile]


@score
def activation_for_softmax(s: Setting) -> Mod:
    """gelu(score) + 1 as the weight of a key, so that o and lse give gelu(S) V."""
    return lambda score, b, h, q, kv: torch.log(torch.nn.functional.gelu(score) + 1.0)


@score
def sandwich(s: Setting) -> Mod:
    """Sandwich (arXiv 2212.10356): products of sinusoidal positions by distance, and a factor of a head."""
    rates = 10000 ** (-torch.arange(0, 32, 2, device=s.device) / 32)
    distances = torch.arange(1 - s.S, s.S, device=s.device)
    table = torch.cos(distances[:, None] * rates).sum(-1)
    factor = s.H / (8.0 * torch.arange(1, s.H + 1, device=s.device))
    return lambda score, b, h, q, kv: score + table[q - kv + (s.S - 1)] * factor[h]


@score
def distances_in_a_graph(s: Setting) -> Mod:
    """Graphormer (arXiv 2106.05234): a learned bias of each head for each distance of two nodes."""
    bias = s.floats(s.H, 6, learned=True)
    nodes = torch.arange(s.S, device=s.device)
    distance = (nodes[:, None] - nodes).abs().clamp(max=5).int().expand(s.B, -1, -1).contiguous()
    return lambda score, b, h, q, kv: score + bias[h, distance[b, q, kv]]


@score
def edges_of_paths_in_a_graph(s: Setting) -> Mod:
    """The same paper's other bias: the mean of learned numbers of the edges of a path."""
    steps, kinds = 3, 4
    bias = s.floats(s.H, steps, kinds, learned=True)
    nodes = torch.arange(s.S, device=s.device)
    length = (nodes[:, None] - nodes).abs().clamp(max=steps).int().expand(s.B, -1, -1).contiguous()
    kind = (nodes[:, None, None] + nodes[:, None] + torch.arange(steps, device=s.device)) % kinds
    kind = kind.int().expand(s.B, -1, -1, -1).contiguous()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        count = length[b, q, kv]
        total: Any = 0.0
        for step in range(steps):
            total = total + torch.where(count > step, bias[h, step, kind[b, q, kv, step]], 0.0)
        return score + total / torch.clamp(count, min=1)

    return mod
