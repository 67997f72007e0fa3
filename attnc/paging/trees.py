"""Trees of drafted tokens: which nodes see which, as kernels read it, and which of them a model accepts.

Speculative decoding by trees (Miao et al., 2023, SpecInfer, arXiv 2305.09781): drafts branch, so that more
than one continuation is verified in one pass. Everything is computed on the device, waits for nothing and can
be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

#: Types of words, and how many bits each has.
WORDS = {torch.uint8: 8, torch.int32: 32, torch.int64: 64}


class DraftTrees:
    """The trees of several sequences.

    parents: integers [B, T], the node before each node; negative for a root, which is a token that is known.
    A parent comes before its children.
    nodes: integers [B], how many of them each sequence has; None: all T. What is behind them means nothing

    sees: bool[B, T, T], node i sees node j: itself or one of its ancestors; those past `nodes` see no node
    and are seen by none
    depths: i64[B, T], ancestors of each node: its position is that of the root plus these
    """

    def __init__(self, parents: torch.Tensor, nodes: torch.Tensor | None = None) -> None:
        """Raises TypeError and ValueError, which name the argument, for other types and shapes."""
        _check("parents", parents, 2)
        if nodes is not None:
            _check("nodes", nodes, 1)
            if len(nodes) != len(parents):
                raise ValueError(f"nodes: expected shape [{len(parents)}], got {list(nodes.shape)}")
        count = parents.shape[1]
        node = torch.arange(count, device=parents.device)
        sizes = torch.full_like(parents[:, :1], count) if nodes is None else nodes[:, None]
        is_there = node < sizes
        self.parents = torch.where(is_there, parents, -1).long()
        self.sees = _find_ancestors(self.parents, node) & is_there[:, :, None] & is_there[:, None, :]
        self.depths = (self.sees.sum(-1) - 1).clamp(min=0)

    def pack(self, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Returns `sees` as words of torch.uint8, int32 or int64, [B, T, ceil(T / bits)]: bit j % bits of
        word j // bits, the lowest first, says that a node sees node j. `draft_tree(words, bits)` of a spec
        reads it.
        """
        return pack_bits(self.sees, dtype)

    def accept(self, drafted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Returns bool[B, T], the nodes that greedy decoding would have made: roots, and those that are what
        the model wanted after their accepted parent.

        drafted: i64[B, T], the token of each node; wanted: i64[B, T], the token of the largest logit after
        it. The children of a node have different tokens, so what is accepted is one path from each root.
        """
        for name, x in (("drafted", drafted), ("wanted", wanted)):
            if x.shape != self.parents.shape:
                raise ValueError(f"{name}: expected shape {list(self.parents.shape)}, got {list(x.shape)}")
        before = wanted.gather(1, self.parents.clamp(min=0))
        is_wanted = (self.parents < 0) | (drafted == before)
        has_path = ~(self.sees & ~is_wanted[:, None, :]).any(-1)
        return has_path & self.sees.diagonal(dim1=1, dim2=2)


def pack_bits(x: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Returns booleans [..., n] as words [..., ceil(n / bits)] of torch.uint8, int32 or int64, the lowest bit
    first. TypeError for another type.
    """
    if dtype not in WORDS:
        raise TypeError(f"dtype: expected {', '.join(map(str, WORDS))}, got {dtype}")
    bits = WORDS[dtype]
    padded = torch.nn.functional.pad(x.bool(), (0, -x.shape[-1] % bits))
    places = torch.arange(bits, device=x.device)
    by_word = padded.view(*padded.shape[:-1], -1, bits).long()
    words: torch.Tensor = (by_word << places).sum(-1)
    return words.to(dtype)  # of more bits than it has the lowest


def _find_ancestors(parents: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """Returns bool[B, T, T] by squaring the matrix of single steps: each time twice as many are made."""
    steps = (parents[:, :, None] == node) | (node[:, None] == node)
    for _ in range(max(len(node) - 1, 0).bit_length()):
        counts = torch.bmm(steps.float(), steps.float())
        steps = counts > 0
    return steps


def _check(name: str, x: torch.Tensor, axes: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
    if x.dim() != axes:
        raise ValueError(f"{name}: expected {axes} axes, got {list(x.shape)}")
