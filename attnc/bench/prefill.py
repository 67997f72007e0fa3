"""What is measured of prompts: tokens of many sequences at once, causal, with grouped heads.

The same q, k and v serve all forms: `dense` in one tensor, where all prompts are as long; `ragged` end to
end; `page_16` and `page_64` with queries end to end and keys in pages of a pool, in random order. So the work
is equal, and what a form costs is what it takes longer than `dense`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

WIDTH, HEADS, KV_HEADS = 128, 32, 8
PAGES = (16, 64)
FORMS = ("dense", "ragged", *(f"page_{page}" for page in PAGES))
_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCell:
    """Prompts of these lengths, in bf16, 32 heads of q and 8 of k and v, head dimension 128."""

    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        few, many = min(self.lengths), max(self.lengths)
        return f"b{len(self.lengths)} n{few}" + ("" if few == many else f" to {many}")

    @property
    def is_equal(self) -> bool:
        """Whether one tensor holds them without padding."""
        return len(set(self.lengths)) == 1

    @property
    def flops(self) -> float:
        """Half of each square counts."""
        return sum(2.0 * HEADS * length**2 * WIDTH for length in self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInputs:
    """q [T, H, D] and k, v [T, Hkv, D] end to end; cu [B + 1], where each prompt begins; lengths [B]; by rows
    of a page k and v as [pages, rows, Hkv, D], and the table [B, P].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor
    lengths: torch.Tensor
    longest: int
    paged: Mapping[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as [B, N, heads, D], which takes prompts of one length."""
        q, k, v = (x.reshape(len(self.lengths), -1, *x.shape[1:]) for x in (self.q, self.k, self.v))
        return q, k, v


def prefill_cells() -> tuple[PrefillCell, ...]:
    """16k tokens in prompts of one length, and in 16 that differ."""
    equal = (PrefillCell(lengths=(length,) * (_TOKENS // length)) for length in (1024, 4096, 16384))
    return (*equal, PrefillCell(lengths=tuple(range(64, 2048, 128))))


def draw_prefill(cell: PrefillCell, device: str = "cuda") -> PrefillInputs:
    """N(0, 1) inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        shape = (sum(cell.lengths), heads, WIDTH)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    q, k, v = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)
    lengths = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return PrefillInputs(
        q=q,
        k=k,
        v=v,
        cu=cu,
        lengths=lengths,
        longest=max(cell.lengths),
        paged={page: _in_pages(k, v, cell.lengths, page, generator) for page in PAGES},
    )


def _in_pages(
    k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], page: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v in pages in random order, and the table of the pages of each prompt."""
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator, device=k.device).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=k.device)
    pools = [x.new_zeros(sum(counts), page, *x.shape[1:]) for x in (k, v)]
    first, token = 0, 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = own = order[first : first + count]
        for pool, x in zip(pools, (k, v), strict=True):
            rows = x.new_zeros(count * page, *x.shape[1:])
            rows[:length] = x[token : token + length]
            pool[own.long()] = rows.reshape(count, page, *x.shape[1:])
        first, token = first + count, token + length
    return pools[0], pools[1], table
