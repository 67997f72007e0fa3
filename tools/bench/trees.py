"""Verifying a tree of drafts beside a causal verification of the same shape: microseconds and their ratio.

    python -m tools.bench.trees [--target cuda.sm_90a]

specs/tree.attn, its mask from words of bits or from booleans, and the same spec with a causal mask take
turns: graphs of calls over copies of the cache that the L2 cache does not hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attnc
from attnc.paging import DraftTrees
from attnc.runtime.timing import interleave

SPEC = Path(__file__).parents[2] / "specs" / "tree.attn"
HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16
#: Sequences, nodes of each tree, and keys of each sequence.
SHAPES = (
    *((batch, nodes, 8192) for batch in (1, 16, 64) for nodes in (8, 64, 256)),
    (1, 8, 131072), (1, 64, 131072), (4, 256, 131072),
)  # fmt: skip
_COLD = 300 << 20


def kernels(target: str) -> dict[str, Callable[..., Any]]:
    """A causal mask, a tree of bits, and one of booleans."""
    text = SPEC.read_text(encoding="utf-8")
    words, mask = "input tree: i32[B, T, W]", "draft_tree(tree, 32)"
    texts = {
        "causal": text.replace(f"causal and {mask}", "causal").replace(f"  {words}\n", ""),
        "bits": text,
        "booleans": text.replace(words, "input tree: bool[B, T, T]").replace(
            mask, "(kv_idx < N - M or tree[b, q_idx, kv_idx - (N - M)])"
        ),
    }
    return {name: attnc.compile(text, attention="tree", target=target) for name, text in texts.items()}


def draw_parents(batch: int, nodes: int) -> torch.Tensor:
    """Trees that are as deep as they are wide, about: [batch, nodes]."""
    node = torch.arange(nodes)
    parents = (node // 2 - 2 + (torch.rand(batch, nodes) * (node - node // 2 + 2)).long()).clamp(min=0)
    return torch.where(node == 0, -1, torch.minimum(parents, node - 1))


def draw(batch: int, nodes: int, keys: int) -> list[dict[str, torch.Tensor]]:
    """Arguments of a call, once for each copy of the cache."""
    pages = -(-keys // PAGE)
    size = batch * pages * PAGE * KV_HEADS * WIDTH * 4
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, nodes, HEADS, WIDTH, **made)
    shared = {
        "q": q,
        "block_table": torch.randperm(batch * pages, device="cuda").int().view(batch, pages),
        "kv_len": torch.full((batch,), keys, device="cuda", dtype=torch.int32),
        "nodes": torch.full((batch,), nodes, device="cuda", dtype=torch.int32),
    }
    shape = (batch * pages, PAGE, KV_HEADS, WIDTH)
    copies = min(_COLD // size + 1, 8)
    return [shared | {name: torch.randn(shape, **made) for name in "kv"} for _ in range(copies)]


def capture(function: Callable[..., Any], calls: list[dict[str, torch.Tensor]]) -> Callable[[], None]:
    """A graph of all calls, one after the other."""
    function(**calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            function(**call)
    return graph.replay


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="cuda.sm_90a")
    target = parser.parse_args().target
    made = kernels(target)
    print(f"{target} on {torch.cuda.get_device_name()}\n")
    print("| sequences | nodes | keys | causal, us | bits, us | booleans, us | bits to causal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for batch, nodes, keys in SHAPES:
        calls = draw(batch, nodes, keys)
        trees = DraftTrees(draw_parents(batch, nodes).cuda())
        given = {"causal": {}, "bits": {"tree": trees.pack()}, "booleans": {"tree": trees.sees}}
        graphs = {name: capture(made[name], [call | given[name] for call in calls]) for name in made}
        us = {name: 1e3 * found.over(len(calls)).median for name, found in interleave(graphs).items()}
        shown = " | ".join(f"{us[name]:.1f}" for name in made)
        print(f"| {batch} | {nodes} | {keys} | {shown} | {us['bits'] / us['causal']:.3f} |", flush=True)
        del calls, graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
