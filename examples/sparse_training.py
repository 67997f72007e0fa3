"""Two attentions that choose blocks of keys for each query, trained with that choice.

    python examples/sparse_training.py                  # NSA and MoBA, 20 steps of each
    python examples/sparse_training.py --runs nsa --steps 3 --length 160

NSA (arXiv 2502.11089) joins three branches by gates: compressed keys, blocks that the compressed keys point
to, and a window. MoBA (arXiv 2502.13189) attends to the blocks whose mean key a query likes most. Blocks are
chosen by PyTorch, on the device, and no host looks at them; the branches are kernels of sparse_training.attn.
After the last step results and gradients of all parameters are compared with dense attention in float64 that
has the same blocks; the program fails if they differ.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

if not torch.cuda.is_available():
    from attnc.verify.interpreter import ensure_interpreter

    ensure_interpreter()

import attnc

Tensor: TypeAlias = torch.Tensor
#: Attention by the name of its spec: of q, k, v and, or None, blocks; o, and lse where there is one.
Attend: TypeAlias = Callable[[str, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]

SPEC = Path(__file__).with_suffix(".attn")
#: Tokens of a compressed key, from one to the next, of a block and of the window, as the spec has them.
SPAN, STRIDE, BLOCK, WINDOW = 32, 16, 64, 64
HEAD, TOP = 32, 3
LARGEST_ERROR = 2e-3


def split(x: Tensor, axis: int, *sizes: int) -> Tensor:
    """Returns x with an axis taken apart."""
    found: Tensor = x.unflatten(axis, sizes)  # type: ignore[no-untyped-call]  # torch's
    return found


# --- which blocks


def choose_by_compressed(q: Tensor, keys: Tensor, lse: Tensor, length: int) -> Tensor:
    """Returns the blocks i32[B, M, Hkv, TOP] that compressed keys [B, C, Hkv, D] point to: those with the
    largest sums of probabilities over the heads of a group, and always the first one and the query's own.
    """
    M, heads, Hkv = q.shape[1], q.shape[2], keys.shape[2]
    grouped = split(q, 2, Hkv, heads // Hkv)
    scores = torch.einsum("bmhgd,bchd->bmhgc", grouped, keys) / HEAD**0.5
    first = torch.arange(keys.shape[1], device=q.device) * STRIDE
    seen = first + SPAN - 1 <= torch.arange(M, device=q.device)[:, None]
    row = split(lse, 2, Hkv, heads // Hkv)[..., None]
    p = torch.exp(scores - row).masked_fill(~seen[:, None, None], 0.0).sum(3)
    starts = torch.arange(-(-length // BLOCK), device=q.device) * BLOCK
    overlap = (first[:, None] < starts + BLOCK) & (starts < first[:, None] + SPAN)
    return take_best(p @ overlap.to(p.dtype))


def choose_by_means(q: Tensor, k: Tensor) -> Tensor:
    """Returns the blocks i32[B, M, H, TOP] whose mean keys have the largest products with each query, and
    always its own.
    """
    padded = nn.functional.pad(k, (0, 0, 0, 0, 0, -k.shape[1] % BLOCK))
    means = split(padded, 1, -1, BLOCK).mean(2)
    return take_best(torch.einsum("bmhd,bchd->bmhc", q, means), first=False)


def take_best(scores: Tensor, *, first: bool = True) -> Tensor:
    """Returns of scores [B, M, H, blocks] the best blocks up to each query's own, which is one of them; -1
    where there are fewer. first: so is the first block.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    own = torch.arange(scores.shape[1], device=scores.device)[:, None] // BLOCK
    forced = (blocks == own) | ((blocks == 0) & first)
    scores = scores.masked_fill(forced[:, None], torch.inf).masked_fill((blocks > own)[:, None], -torch.inf)
    best = scores.topk(min(TOP, scores.shape[-1]), dim=-1)
    return torch.where(best.values > -torch.inf, best.indices, -1).int()


# --- attention: by kernels, and densely in float64


@cache
def compiled(name: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    return attnc.compile(SPEC, attention=name, target="triton")


def attend_by_kernels(
    name: str, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    found = compiled(name)(q, k, v, *(() if blocks is None else (blocks,)))
    return (found[0], found[1]) if isinstance(found, tuple) else (found, None)


def attend_densely(
    name: str, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns what a spec says, with a mask [B, M, H, N] of all pairs."""
    query = torch.arange(q.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    keep = {"compressed": key * STRIDE + SPAN - 1 <= query, "local": query - key < WINDOW}.get(name)
    mask = (torch.ones_like(key <= query) if keep is None else keep)[None, :, None]
    if name != "compressed":
        mask = mask & (key <= query)[None, :, None]
    if blocks is not None:
        mask = mask & (blocks[..., None].long() == key // BLOCK).any(-2)
    group = q.shape[2] // k.shape[2]
    mask = mask.repeat_interleave(group, 2) if mask.shape[2] > 1 else mask
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bmhn", q, k) / HEAD**0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - torch.where(lse == -torch.inf, torch.inf, lse)[..., None])
    return torch.einsum("bmhn,bnhd->bmhd", p, v), lse


# --- layers


class Nsa(nn.Module):
    """Three branches, each with keys and values of its own, and a gate for each head and branch."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q = nn.Linear(width, heads * HEAD, bias=False)
        self.kv = nn.Linear(width, 6 * kv_heads * HEAD, bias=False)
        self.compress = nn.Linear(SPAN, 2, bias=False)  # of keys, and of values: a weight for each token
        self.gate = nn.Linear(width, 3 * heads)
        self.out = nn.Linear(heads * HEAD, width, bias=False)

    def forward(self, x: Tensor, attend: Attend, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the result [B, M, width], and the blocks that were chosen, or are given."""
        q = split(self.q(x), -1, self.heads, HEAD)
        k_c, v_c, k_s, v_s, k_w, v_w = split(self.kv(x), -1, 6, self.kv_heads, HEAD).unbind(2)
        k_c, v_c = (
            (spans.unfold(1, SPAN, STRIDE) * weights).sum(-1).contiguous()
            for spans, weights in zip((k_c, v_c), self.compress.weight, strict=True)
        )
        compressed, lse = attend("compressed", q, k_c, v_c, None)
        if blocks is None:
            assert lse is not None
            with torch.no_grad():
                blocks = choose_by_compressed(q, k_c, lse, x.shape[1])
        selected, _ = attend("selected", q, k_s, v_s, blocks)
        local, _ = attend("local", q, k_w, v_w, None)
        gates = split(torch.sigmoid(self.gate(x)), -1, 3, self.heads, 1).unbind(2)
        joined = sum(gate * o for gate, o in zip(gates, (compressed, selected, local), strict=True))
        return self.out(torch.as_tensor(joined).flatten(-2)), blocks


class Moba(nn.Module):
    """One attention over the blocks that each head chooses."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * HEAD, bias=False)
        self.out = nn.Linear(heads * HEAD, width, bias=False)

    def forward(self, x: Tensor, attend: Attend, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the result [B, M, width], and the blocks that were chosen, or are given."""
        q, k, v = split(self.qkv(x), -1, 3, self.heads, HEAD).unbind(2)
        if blocks is None:
            with torch.no_grad():
                blocks = choose_by_means(q, k)
        o, _ = attend("moba", q, k, v, blocks)
        return self.out(o.flatten(-2)), blocks


class Model(nn.Module):
    """Tokens, one layer of attention with a residual, and the next token."""

    def __init__(self, layer: nn.Module, width: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(tokens, width), layer
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens: Tensor, attend: Attend, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns logits [B, M, tokens], and the blocks of the layer."""
        x = self.embed(tokens)
        y, blocks = self.layer(self.norm(x), attend, blocks)
        return self.head(x + y), blocks


# --- training


def draw_tokens(count: int, length: int, vocabulary: int) -> Tensor:
    """Returns sequences i64[count, length + 1] that repeat themselves: the next token stands further back."""
    period = torch.randint(vocabulary, (count, BLOCK + 7))
    return period.repeat(1, -(-(length + 1) // period.shape[1]))[:, : length + 1]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: Model, steps: int, length: int, device: torch.device) -> list[float]:
    """Returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        tokens = draw_tokens(1, length, 32).to(device)
        logits, _ = model(tokens[:, :-1], attend_by_kernels)
        loss = loss_of(logits, tokens)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compare(model: Model, length: int, device: torch.device) -> float:
    """Returns the largest error of logits and gradients, each as a share of the largest number in its tensor,
    against dense attention in float64 with the same blocks.
    """
    tokens = draw_tokens(1, length, 32).to(device)
    exact = copy.deepcopy(model).double()
    logits, blocks = model(tokens[:, :-1], attend_by_kernels)
    expected, _ = exact(tokens[:, :-1], attend_densely, blocks)
    model.zero_grad()
    torch.autograd.backward([loss_of(logits, tokens), loss_of(expected, tokens)])
    pairs = [(logits.detach(), expected.detach())]
    pairs += [(x.grad, y.grad) for x, y in zip(model.parameters(), exact.parameters(), strict=True)]
    return max(float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-12)) for x, y in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and compares; 1 where results differ from dense attention's."""
    parser = argparse.ArgumentParser(description="NSA and MoBA, trained for some steps")
    parser.add_argument("--runs", default="nsa,moba")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    differs = False
    for run in options.runs.split(","):
        torch.manual_seed(0)
        layer = Nsa(64, 4, 2) if run == "nsa" else Moba(64, 2)
        model = Model(layer, 64, 32).to(device)
        losses = train(model, options.steps, options.length, device)
        error = compare(model, options.length, device)
        differs |= not error < LARGEST_ERROR
        steps = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps; " if losses else ""
        print(f"{run}: {steps}largest difference to dense attention {error:.1e}")
    return int(differs)


if __name__ == "__main__":
    raise SystemExit(main())
