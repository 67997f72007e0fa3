"""Speculative decoding of a Llama by trees of drafts: the same tokens as one by one, several a step.

The model drafts by its own first layers (self-speculation; Zhang et al. 2023, arXiv 2309.08168): what they
would say next, and next best, grows into a tree, level by level. Then all layers see the whole tree in one
pass (Miao et al. 2023, arXiv 2305.09781), and the path that greedy decoding would have taken stays in the
pages. Without a GPU a small model is interpreted.

    python -m examples.llama_tree --size 1b
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from attnc.paging import DraftTrees, Step
from examples.llama_model import ONE_BILLION, Llama, Sizes
from examples.llama_paged import PagedDecoder, first

#: Small enough to be interpreted, with layers enough for the first ones to foresee the last.
SMALL = Sizes(layers=6, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, vocab=67)


def tree_kernel(dtype: torch.dtype, head_dim: int) -> Callable[..., Any]:
    """In bf16 that of generated/, in f32 that of examples/llama.attn, compiled here."""
    if dtype == torch.bfloat16:
        found: Callable[..., Any] = import_module("generated.tree").tree
        return found
    from attnc.build import front, plan_program
    from attnc.runtime.loader import load_module

    for module in plan_program(front(Path(__file__).with_name("llama.attn"))).modules:
        if module.variant.attention.name == "llama_tree" and module.variant.params["D"] == head_dim:
            made: Callable[..., Any] = load_module(module).llama_tree
            return made
    raise ValueError(f"head_dim: expected 16 or 128, got {head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of trees. layers: of the model that draft; widths: nodes of each level below the root, so that (8, 64)
    has eight children of the root, and as many of each of them, if all are as likely; least: how likely a
    drafted path has to be for its sequence to have another level.
    """

    layers: int
    widths: tuple[int, ...]
    least: float = 0.0

    @property
    def nodes(self) -> int:
        return 1 + sum(self.widths)


@dataclass(slots=True)
class Drafts:
    """tokens, parents: i64[B, nodes so far]; likely: f32[B, nodes of the last level], logarithms; nodes:
    i32[B], how many each sequence has.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    likely: torch.Tensor
    nodes: torch.Tensor

    def grow(self, logits: torch.Tensor, width: int, least: float) -> None:
        """Adds the best `width` continuations of the last level: f32[B, its nodes, vocab]."""
        batch, known = self.tokens.shape
        each = min(width, logits.shape[-1])
        chances, tokens = logits.log_softmax(-1).topk(each, -1)
        likely, best = (self.likely[:, :, None] + chances).view(batch, -1).topk(width, -1)
        parents = known - self.likely.shape[1] + best // each
        goes_on = (self.nodes == known) & (likely[:, 0].exp() >= least)
        self.tokens = torch.cat([self.tokens, tokens.view(batch, -1).gather(1, best)], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.likely = likely
        self.nodes = self.nodes + width * goes_on.int()


@dataclass(slots=True)
class TreeDecoder:
    """Greedy decoding by drafts, over the pages of a decoder. accepted: tokens of each step of a sequence."""

    paged: PagedDecoder
    shape: Shape
    accepted: list[int] = field(default_factory=list)
    kernel: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = tree_kernel(self.paged.model.dtype, self.paged.model.sizes.head_dim)

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """`steps` tokens after each prompt, each the most likely. OutOfPages where no tree fits."""
        sequences, logits = self.paged.prefill(prompts)
        answers = [[token] for token in logits.argmax(1).tolist()]
        going = list(range(len(prompts)))
        while going := [b for b in going if len(answers[b]) < steps]:
            found = self.step([sequences[b] for b in going], [answers[b][-1] for b in going])
            self.accepted += map(len, found)
            for b, tokens in zip(going, found, strict=True):
                answers[b] += tokens
        self.paged.free(sequences)
        return [answer[:steps] for answer in answers]

    def step(self, sequences: Sequence[int], roots: Sequence[int]) -> list[list[int]]:
        """The tokens that follow each root, one at least. roots: the last token of each sequence, which its
        pages do not have yet.
        """
        model, cache = self.paged.model, self.paged.cache
        lengths = [cache.length(sequence) for sequence in sequences]
        new = cache.append(sequences, self.shape.nodes)
        start = torch.tensor(lengths, device=model.device)
        drafts = self.draft(torch.tensor(roots, device=model.device), start, new)
        trees = DraftTrees(drafts.parents, drafts.nodes)
        wanted = model.logits(self.hidden(drafts, trees, start, new)).argmax(-1).view_as(drafts.tokens)
        path = trees.accept(drafts.tokens, wanted)
        places = [row.nonzero().flatten().tolist() for row in path.cpu()]
        cache.keep(sequences, lengths, places)
        return [row[nodes].tolist() for row, nodes in zip(wanted.cpu(), places, strict=True)]

    def draft(self, roots: torch.Tensor, start: torch.Tensor, new: Step) -> Drafts:
        """Trees below the roots, made by the first layers."""
        batch, model = len(roots), self.paged.model
        drafts = Drafts(
            roots[:, None],
            torch.full_like(roots, -1)[:, None],
            torch.zeros(batch, 1, device=roots.device),
            torch.ones_like(roots, dtype=torch.int32),
        )
        for width in self.shape.widths:
            level = drafts.likely.shape[1]
            x = self.hidden(drafts, DraftTrees(drafts.parents), start, new, self.shape.layers)
            logits = model.logits(x.view(batch, -1, x.shape[-1])[:, -level:])
            drafts.grow(logits, width, self.shape.least)
        return drafts

    def hidden(
        self,
        drafts: Drafts,
        trees: DraftTrees,
        start: torch.Tensor,
        new: Step,
        layers: int | None = None,
    ) -> torch.Tensor:
        """[B * nodes, hidden] of all nodes so far, whose keys and values go to the first slots of a step."""
        batch, count = drafts.tokens.shape
        cache, words = self.paged.cache, trees.pack()
        slots = new.slots.view(batch, -1)[:, :count].flatten()
        nodes = trees.sees.diagonal(dim1=1, dim2=2).sum(-1, dtype=torch.int32)
        lengths = start.int() + nodes

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.write(slots, k, v, layer)
            pools = cache.k(layer), cache.v(layer)
            rows = q.view(batch, count, *q.shape[1:])
            return first(self.kernel(rows, *pools, words, new.block_table, lengths, nodes)).flatten(0, 1)

        positions = start[:, None] + trees.depths
        return self.paged.model.hidden(drafts.tokens.flatten(), positions.flatten(), attend, layers)


@torch.no_grad()
def main() -> None:
    from attnc.verify.interpreter import ensure_interpreter
    from examples.llama_model import DenseDecoder
    from examples.llama_search import greedy

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=["small", "1b"], default="small")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        ensure_interpreter()
    is_small = arguments.size == "small"
    model = Llama(SMALL if is_small else ONE_BILLION, dtype=torch.float32, device=device)
    shape = Shape(layers=4, widths=(4, 4, 4)) if is_small else Shape(layers=14, widths=(8, 64))
    prompts = [[5, 9, 2] * 5 + [7], [3], [11, 60, 4, 8]]
    room = max(map(len, prompts)) + arguments.tokens + shape.nodes
    paged = PagedDecoder(
        model, pages=len(prompts) * (room // 16 + 2), sequences=len(prompts), max_length=room
    )
    decoder = TreeDecoder(paged, shape)
    found = decoder.greedy(prompts, arguments.tokens)
    expected = greedy(DenseDecoder(model), prompts, arguments.tokens)
    equal = sum(
        a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )
    print(f"{equal} of {sum(map(len, expected))} tokens are those of decoding one by one")
    mean = sum(decoder.accepted) / len(decoder.accepted)
    print(f"{mean:.2f} tokens a step, of trees of up to {shape.nodes} nodes")


if __name__ == "__main__":
    main()
