"""What is measured of decoding: one new token for each sequence against its cache, which the memory bounds.

Inputs come in several copies, more bytes together than any cache holds, and launches take turns over them: a
real step finds nothing of its cache in L2 either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

Normal: TypeAlias = Callable[..., torch.Tensor]

WIDTH, PAGE = 128, 16
#: Rows of a page that a kernel is made for: those of the tables, and smaller ones.
PAGES = (PAGE, 8, 4)
#: Bytes of K and V that launches rotate over; the L2 cache of an H200 holds 50 MB.
ROTATED = 384 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    """One row of a table: `batch` sequences of `length` keys each, in bf16, head dimension 128."""

    batch: int
    heads: int
    kv_heads: int
    length: int

    @property
    def name(self) -> str:
        return f"b{self.batch} hq{self.heads} hkv{self.kv_heads} n{self.length}"

    @property
    def bytes(self) -> int:
        """Of K and V: what a step must read."""
        return self.batch * self.length * self.kv_heads * 2 * WIDTH * 2

    @property
    def copies(self) -> int:
        return max(2, -(-ROTATED // self.bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """One copy: q [B, 1, H, D]; k, v [B, N, Hkv, D]; the same number of keys in a pool [B * N, Hkv, D] of
    pages, and by rows of a page the table [B, N / rows] of pages in random order; kv_len [B].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    tables: Mapping[int, torch.Tensor]
    kv_len: torch.Tensor

    def paged(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k and v in pages [B * N / page, page, Hkv, D], and their table."""
        k, v = (pool.view(-1, page, *pool.shape[1:]) for pool in (self.k_pool, self.v_pool))
        return k, v, self.tables[page]


def decode_cells() -> tuple[DecodeCell, ...]:
    """Batch 1, short and long; batches of 8k; every head its own keys; all heads the same keys."""
    shapes = (
        (1, 32, 8, 8192),
        (1, 32, 8, 131072),
        (16, 32, 8, 8192),
        (64, 32, 8, 8192),
        (16, 32, 32, 8192),
        (32, 16, 1, 16384),
    )
    return tuple(DecodeCell(batch=b, heads=h, kv_heads=kv, length=n) for b, h, kv, n in shapes)


def scaling_cells() -> tuple[DecodeCell, ...]:
    """One sequence that grows from 8k to 128k keys, without the two ends."""
    return tuple(DecodeCell(batch=1, heads=32, kv_heads=8, length=8192 << i) for i in range(1, 4))


def draw_decode(cell: DecodeCell, copies: int) -> tuple[DecodeInputs, ...]:
    """N(0, 1) inputs on the current CUDA device."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return tuple(_copy(cell, normal, generator) for _ in range(copies))


def _copy(cell: DecodeCell, normal: Normal, generator: torch.Generator) -> DecodeInputs:
    cache = (cell.batch, cell.length, cell.kv_heads, WIDTH)
    pool = (cell.batch * cell.length, cell.kv_heads, WIDTH)

    def table(page: int) -> torch.Tensor:
        order = torch.randperm(pool[0] // page, generator=generator, device="cuda")
        return order.to(torch.int32).reshape(cell.batch, -1)

    return DecodeInputs(
        q=normal(cell.batch, 1, cell.heads, WIDTH),
        k=normal(*cache),
        v=normal(*cache),
        k_pool=normal(*pool),
        v_pool=normal(*pool),
        tables={page: table(page) for page in PAGES},
        kv_len=torch.full((cell.batch,), cell.length, device="cuda", dtype=torch.int32),
    )
