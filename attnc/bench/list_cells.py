"""Attention over lists as models make it: shapes, lists, and the specs of attnc that say it.

FLOPs are those of products over what lists name, for each query and key: 2 D and 2 Dv of the two of a
forward; 6 D and 4 Dv of the five that gradients take at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

Job: TypeAlias = Literal["forward", "gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCell:
    """A row of the table, of bf16. For every `rows` queries of a K/V head a list names `entries` blocks of
    `block` keys. shared: the share of its entries that a list has from that of the queries before it; latent:
    values are the first columns of the keys; causal: lists name no later block than that of their queries,
    and all keys where there are fewer.
    """

    model: str
    job: Job = "forward"
    batch: int = 1
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int = 128
    value: int = 128
    rows: int
    block: int
    entries: int
    causal: bool = False
    latent: bool = False
    shared: float = 0.0

    @property
    def name(self) -> str:
        kind = f"{self.rows}x{self.block} top {self.entries}"
        size = f"b{self.batch} m{self.queries} n{self.keys} h{self.heads}/{self.kv_heads}"
        shared = f" shared {self.shared:.0%}".replace("%", " %") if self.shared else ""
        return f"{self.model} {kind} {size}{shared} {self.job}"

    @property
    def blocks(self) -> int:
        return -(-self.keys // self.block)

    @property
    def lists(self) -> int:
        return -(-self.queries // self.rows)

    @property
    def visited(self) -> int:
        return sum(self.rows * self.block * self.entries_of(at) for at in range(self.lists)) * self.batch

    def entries_of(self, at: int) -> int:
        return min(self.entries, self.last_block(at) + 1)

    def last_block(self, at: int) -> int:
        if not self.causal:
            return self.blocks - 1
        return (at * self.rows + self.keys - self.queries) // self.block

    @property
    def flops(self) -> float:
        return self._products * self.visited

    @property
    def kept_flops(self) -> float:
        pairs = self.queries * self.keys - (self.queries * (self.queries - 1) // 2 if self.causal else 0)
        return self._products * self.batch * pairs

    @property
    def _products(self) -> float:
        of_k, of_v = (3, 2) if self.job == "gradients" else (1, 1)
        return 2.0 * self.heads * (of_k * self.width + of_v * self.value)

    @property
    def form(self) -> ListCell:
        heads, kv_heads = (self.heads, self.kv_heads) if self.rows == 1 else (1, 1)
        alike = replace(self, model="", batch=1, queries=1, keys=1, entries=1, shared=0.0)
        return replace(alike, heads=heads, kv_heads=kv_heads)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The inputs that have gradients: values that are columns of the keys share those of the keys."""
        return ("q", "k") if self.latent else ("q", "k", "v")

    def spec(self, *, dense: bool = False) -> str:
        """Returns the spec of attnc, without a schedule. dense: over all keys."""
        heads, kv_heads = (str(self.heads), str(self.kv_heads)) if self.rows == 1 else ("Hkv * G", "Hkv")
        v = f"v: bf16[B, N, {kv_heads}, {self.value}]"
        kv = f"input k: bf16[B, N, {kv_heads}, {self.width}]\n  input {v}"
        kv += " via prefix(k)" if self.latent else ""
        listed = f"listed(idx, rows = {self.rows}, keys = {self.block})"
        conditions = ([] if dense else [listed]) + ["causal"] * self.causal
        mask = f"mask = {' and '.join(conditions)}" if conditions else ""
        return f"""attention lists {{
  input q: bf16[B, M, {heads}, {self.width}]
  {kv}
  {"" if dense else f"input idx: i32[B, {kv_heads}, {'M' if self.rows == 1 else 'R'}, S] is distinct"}
  score = dot(q, k) / sqrt({self.width})
  {mask}
  normalize = softmax
  output o: bf16[B, M, {heads}, {self.value}]
  {f"grad {', '.join(self.differentiated)}" if self.job == "gradients" else ""}
}}
"""


def list_cells() -> tuple[ListCell, ...]:
    """Returns all cells: blocks of queries, then queries with blocks, then queries with tokens."""
    return (*_blocks(), *_list_selected_cells(), *_tokens())


def _blocks() -> Iterator[ListCell]:
    video = ListCell(
        model="video", queries=40768, keys=40768, heads=16, kv_heads=16, rows=1, block=1, entries=1
    )
    jobs: tuple[Job, ...] = ("forward", "gradients")
    for size, share in ((64, 10), (128, 10), (128, 25), (128, 50)):
        entries = -(-video.keys // size) * share // 100
        for job in jobs:
            yield replace(video, rows=size, block=size, entries=entries, job=job)


def _list_selected_cells() -> Iterator[ListCell]:
    for model, heads, kv_heads, block in (("NSA", 64, 4, 64), ("MSA", 64, 4, 128)):
        made = ListCell(
            model=model, queries=16384, keys=16384, heads=heads, kv_heads=kv_heads,
            rows=1, block=block, entries=16, causal=True,
        )  # fmt: skip
        yield made
        yield replace(made, shared=0.9)
        yield replace(made, job="gradients")
        yield replace(made, batch=32, queries=1)


def _tokens() -> Iterator[ListCell]:
    made = ListCell(
        model="DSA", queries=4096, keys=8192, heads=128, kv_heads=1, width=576, value=512, latent=True,
        rows=1, block=1, entries=2048,
    )  # fmt: skip
    yield made
    yield replace(made, keys=32768)
    for heads in (128, 16):
        yield replace(made, heads=heads, job="gradients")
    for heads in (64, 16, 8):
        yield replace(made, heads=heads)
    for heads in (16, 8):
        yield replace(made, heads=heads, shared=0.9)
    for batch in (1, 64):
        yield replace(made, batch=batch, queries=1, keys=32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListInputs:
    """q [B, M, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv], of latents the first columns of k; idx: i32[B,
    Hkv, lists, S], each entry of a list once, -1 where it has fewer.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    idx: torch.Tensor


def draw_inputs(cell: ListCell, device: str = "cuda", seed: int = 0) -> ListInputs:
    """Returns inputs of N(0, 1), and lists of random blocks, the own one among them where it is causal."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).bfloat16()

    q = normal(cell.batch, cell.queries, cell.heads, cell.width)
    k = normal(cell.batch, cell.keys, cell.kv_heads, cell.width)
    v = k[..., : cell.value] if cell.latent else normal(*k.shape[:-1], cell.value)
    return ListInputs(q=q, k=k, v=v, idx=draw_lists(cell, generator))


def draw_lists(cell: ListCell, generator: torch.Generator) -> torch.Tensor:
    """Returns the lists of a cell, ascending. Each draws blocks by random weights, of which a share are those
    of the list before it: so many of its entries are the same, about.
    """
    device = generator.device
    last = torch.tensor([cell.last_block(at) for at in range(cell.lists)], device=device)
    found = torch.full(
        (cell.batch, cell.kv_heads, cell.lists, cell.entries), -1, dtype=torch.int32, device=device
    )
    numbers = torch.arange(cell.blocks, device=device)
    weights: torch.Tensor | None = None
    chunk = 1 if cell.shared else max(1, (1 << 26) // (cell.batch * cell.kv_heads * cell.blocks))
    for first in range(0, cell.lists, chunk):
        own = last[first : first + chunk]
        shape = (cell.batch, cell.kv_heads, len(own), cell.blocks)
        drawn = torch.rand(shape, generator=generator, device=device)
        if cell.shared and weights is not None:
            kept = torch.rand(shape, generator=generator, device=device) < cell.shared
            drawn = torch.where(kept, weights, drawn)
        weights = drawn
        ranked = drawn.masked_fill(numbers > own[:, None], -1.0)
        if cell.causal:
            ranked.scatter_(-1, own.view(1, 1, -1, 1).expand(*shape[:3], 1), 2.0)
        top = ranked.topk(min(cell.entries, cell.blocks), dim=-1)
        named = top.indices.masked_fill(top.values < 0, cell.blocks).sort(dim=-1).values
        named = named.masked_fill(named == cell.blocks, -1).int()
        found[:, :, first : first + chunk, : named.shape[-1]] = named
    return found
