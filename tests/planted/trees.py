"""Bugs planted in how kernels read a tree of drafts: words, bits, and where the tree lies."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, HopperBug, TritonBug

BUGS: tuple[Bug, ...] = (
    TritonBug(
        name="bits of keys in the place of drafts",
        attention="tree",
        story="trees began at multiples of the words' bits, until prompts were of any length",
        anchor="(tree_tile >> ((kv_idx[None, :] - (N - M)) & 31))",
        patch="(tree_tile >> (kv_idx[None, :] & 31))",
    ),
    TritonBug(
        name="the first word of every node",
        attention="tree",
        story="trees had 32 nodes at most once",
        anchor="& 31)) & 1) != 0)",
        patch="& 31)) & 1) != 0) & (kv_idx[None, :] - (N - M) < 32)",
    ),
    TritonBug(
        name="the tree of the first request",
        attention="tree",
        story="all requests had one tree once",
        anchor="tree_row = tree_ptr + b.to(tl.int64) * stride_tree_0",
        patch="tree_row = tree_ptr + b.to(tl.int64) * 0",
    ),
    TritonBug(
        name="keys before the tree hidden",
        attention="tree",
        story="a mask of the drafts alone was taken for one of all keys",
        anchor="(kv_idx[None, :] < N - M) | (((tree_tile",
        patch="(kv_idx[None, :] < 0) | (((tree_tile",
    ),
    CudaBug(
        name="bits from the highest",
        attention="tree",
        story="words were packed as numpy packs them",
        anchor="((kv_idx - (N - M)) & 31)",
        patch="(31 - ((kv_idx - (N - M)) & 31))",
    ),
    CudaBug(
        name="nodes of the query's row among all heads",
        attention="tree",
        story="rows of a tile are of a token and a head, and a row was taken for a token",
        anchor="tree_row[q_idx[r] * args.stride_tree_1",
        patch="tree_row[min(q_idx[r] * 2, T - 1) * args.stride_tree_1",
    ),
    HopperBug(
        name="a word behind the last",
        attention="tree",
        story="rows of words were thought to be as long as trees",
        anchor="&& word < W",
        patch="&& word <= W",
    ),
    HopperBug(
        name="siblings see each other",
        attention="tree",
        story="a chain's mask was thought to hold for the branches of a node",
        anchor="(8 * j % 32 + c) & 1) != 0)",
        patch="(8 * j % 32 + c) & 1) != 0 || kv_idx == q_pos[r] - 1)",
    ),
    HopperBug(
        name="the first words of a row for every tile",
        attention="tree",
        story="trees had as many nodes as a tile has keys, at most",
        anchor="const int word = tree_tile_word + i;",
        patch="const int word = i;",
    ),
    HopperBug(
        name="words that no tile straddles",
        attention="tree",
        story="trees began at multiples of the words' bits, until prompts were of any length",
        anchor="bits_from(words[i], words[i + 1], ",
        patch="bits_from(words[i], words[i], ",
    ),
)
