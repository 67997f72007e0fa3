"""What else is measured of decoding: compressed keys (MLA), drafts to verify, prefixes that sequences share.

Inputs come in copies that no cache holds, as in `bench/decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from attnc.bench.decode import PAGE, ROTATED, WIDTH

Kind: TypeAlias = Literal["mla", "verify", "prefix"]

#: Query heads, columns of a compressed key and of its value; rows of its pages.
MLA_HEADS, MLA_WIDTH, MLA_VALUE, MLA_PAGE = 128, 576, 512, 64
MLA_SCALE = 192**-0.5
#: Query and K/V heads of the other kinds; drafted tokens and rows of their pages; a sequence's own keys.
HEADS, KV_HEADS, DRAFTS, DRAFT_PAGE, SUFFIX = 32, 8, 8, 64, 512
#: NVIDIA H200 data sheet: bytes and dense bf16 operations in a second.
MEMORY, TENSOR = 4.8e12, 989e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCell:
    """One row of a table, in bf16. length: keys of a sequence, or of the prefix that all of them share."""

    kind: Kind
    batch: int
    length: int

    @property
    def name(self) -> str:
        own = f"+{SUFFIX}" if self.kind == "prefix" else ""
        return f"{self.kind} b{self.batch} n{self.length}{own}"

    @property
    def bytes(self) -> int:
        """Of keys and values that a step must read, each once."""
        if self.kind == "mla":
            return self.batch * self.length * MLA_WIDTH * 2
        keys = self.length + self.batch * SUFFIX if self.kind == "prefix" else self.batch * self.length
        return keys * KV_HEADS * 2 * WIDTH * 2

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products, for every key that a row sees."""
        if self.kind == "mla":
            return 2.0 * self.batch * MLA_HEADS * self.length * (MLA_WIDTH + MLA_VALUE)
        rows = self.batch * (DRAFTS if self.kind == "verify" else 1)
        keys = self.length + (SUFFIX if self.kind == "prefix" else 0)
        return 4.0 * rows * HEADS * keys * WIDTH

    @property
    def roofline(self) -> float:
        """Seconds that a step takes at least."""
        return max(self.bytes / MEMORY, self.flops / TENSOR)

    @property
    def copies(self) -> int:
        return max(2, -(-ROTATED // self.bytes))


def serving_cells() -> tuple[ServingCell, ...]:
    mla = (ServingCell(kind="mla", batch=b, length=8192) for b in (1, 16, 64))
    verify = (ServingCell(kind="verify", batch=b, length=8192) for b in (1, 16, 64))
    prefix = (ServingCell(kind="prefix", batch=b, length=n) for b, n in ((16, 8192), (64, 8192), (64, 32768)))
    return (*mla, *verify, *prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInputs:
    """One copy. mla: q [B, 1, 128, 576], k and its first columns v in pages [pages, 64, 1, 576]. verify: q
    [B, 8, H, D], pages [pages, Hkv, 64, D]. prefix: q [B, 1, H, D], pages [pages, 16, Hkv, D], of which every
    row of the table begins with the same. Pages lie in random order.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    kv_len: torch.Tensor


def draw_serving(cell: ServingCell, copies: int) -> tuple[ServingInputs, ...]:
    """N(0, 1) inputs on the current CUDA device."""
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(_copy(cell, generator) for _ in range(copies))


def _copy(cell: ServingCell, generator: torch.Generator) -> ServingInputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    def pages(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator, device="cuda").to(torch.int32)

    batch, length = cell.batch, cell.length
    if cell.kind == "mla":
        table = pages(batch * length // MLA_PAGE).reshape(batch, -1)
        k = normal(table.numel(), MLA_PAGE, 1, MLA_WIDTH)
        q, v = normal(batch, 1, MLA_HEADS, MLA_WIDTH), k[..., :MLA_VALUE]
    elif cell.kind == "verify":
        table = pages(batch * length // DRAFT_PAGE).reshape(batch, -1)
        k, v = (normal(table.numel(), KV_HEADS, DRAFT_PAGE, WIDTH) for _ in range(2))
        q = normal(batch, DRAFTS, HEADS, WIDTH)
    else:
        order = pages((length + batch * SUFFIX) // PAGE)
        shared, own = order[: length // PAGE], order[length // PAGE :].reshape(batch, -1)
        table = torch.cat([shared.expand(batch, -1), own], 1).contiguous()
        k, v = (normal(order.numel(), PAGE, KV_HEADS, WIDTH) for _ in range(2))
        q, length = normal(batch, 1, HEADS, WIDTH), length + SUFFIX
    kv_len = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    return ServingInputs(q=q, k=k, v=v, block_table=table, kv_len=kv_len)
