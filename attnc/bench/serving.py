"""Further cells of decoding: compressed keys (MLA), drafts to verify, prefixes that sequences share.

`attnc bench --decode` times them in copies that no cache holds. No peer of PyTorch's reads pages: each gets
the keys in order, in a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.peers import OURS, kernel_of
from attnc.bench.report import document, gaps, ratio, table
from attnc.bench.run import Candidate, Result
from attnc.runtime.merge import merge_states
from attnc.runtime.timing import Launch

SPEC = Path(__file__).parent / "specs" / "decode" / "serving.attn"
Kind: TypeAlias = Literal["mla", "verify", "prefix"]

#: Query heads, columns of a compressed key and of its value; rows of its pages.
MLA_HEADS, MLA_WIDTH, MLA_VALUE, MLA_PAGE = 128, 576, 512, 64
MLA_SCALE = 192**-0.5
#: Query and K/V heads and columns of the other kinds; drafted tokens and rows of their pages; rows of the
#: pages of prefixes, and a sequence's own keys.
HEADS, KV_HEADS, WIDTH = 32, 8, 128
DRAFTS, DRAFT_PAGE, PAGE, SUFFIX = 8, 64, 16, 512
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
        if self.kind == "mla":
            return self.batch * self.length * MLA_WIDTH * 2
        keys = self.length + self.batch * SUFFIX if self.kind == "prefix" else self.batch * self.length
        return keys * KV_HEADS * 2 * WIDTH * 2

    @property
    def flops(self) -> float:
        if self.kind == "mla":
            return 2.0 * self.batch * MLA_HEADS * self.length * (MLA_WIDTH + MLA_VALUE)
        rows = self.batch * (DRAFTS if self.kind == "verify" else 1)
        keys = self.length + (SUFFIX if self.kind == "prefix" else 0)
        return 4.0 * rows * HEADS * keys * WIDTH

    @property
    def roofline(self) -> float:
        return max(self.bytes / MEMORY, self.flops / TENSOR)


def serving_cells() -> tuple[ServingCell, ...]:
    """Returns some batches and lengths of each kind."""
    shapes = ((1, 2048), (1, 8192), (2, 8192), (4, 8192), (16, 8192), (64, 8192), (1, 65536))
    mla = (ServingCell(kind="mla", batch=b, length=n) for b, n in shapes)
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
    """Returns N(0, 1) inputs on the current CUDA device."""
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


Server: TypeAlias = Candidate[ServingCell, ServingInputs]
Make: TypeAlias = Callable[[ServingCell, ServingInputs], Launch]


def _make_generated(target: str, name: str) -> Make:
    def make(_: ServingCell, x: ServingInputs) -> Launch:
        kernel = kernel_of(SPEC, target, name)
        if name == "mla":  # v is the first columns of k
            return lambda: kernel(x.q, x.k, x.block_table, x.kv_len)
        return lambda: kernel(x.q, x.k, x.v, x.block_table, x.kv_len)

    return make


def _cascade(target: str, _: ServingCell, x: ServingInputs) -> Launch:
    shared, own = kernel_of(SPEC, target, "shared"), kernel_of(SPEC, target, "own")
    batch, pages = x.block_table.shape
    prefix = pages - SUFFIX // PAGE
    q = x.q.reshape(1, batch, HEADS, WIDTH)
    table, own_table = x.block_table[:1, :prefix], x.block_table[:, prefix:]
    length, own_length = x.kv_len[:1] - SUFFIX, torch.full_like(x.kv_len, SUFFIX)
    merge = _compiled_merge()

    def launch() -> object:
        o, lse = shared(q, x.k, x.v, table, length)
        own_o, own_lse = own(x.q, x.k, x.v, own_table, own_length)
        return merge(o.reshape(own_o.shape), lse.reshape(own_lse.shape), own_o, own_lse)

    return launch


@cache
def _compiled_merge() -> Any:
    return torch.compile(merge_states, dynamic=False)


def _in_order(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    rows = pages[table.long()].transpose(1, 2)
    return rows.reshape(table.shape[0], pages.shape[1], -1, pages.shape[3])


def _drafts(backend: SDPBackend) -> Make:
    """Returns what makes a launch in which every draft sees the keys before its own: the mask is aligned with
    the last key.
    """

    def make(_: ServingCell, x: ServingInputs) -> Launch:
        from torch.nn.attention.bias import causal_lower_right

        q, k, v = x.q.transpose(1, 2), _in_order(x.k, x.block_table), _in_order(x.v, x.block_table)
        mask: Any = causal_lower_right(DRAFTS, k.shape[2])
        if backend is SDPBackend.CUDNN_ATTENTION:
            mask = torch.ones(DRAFTS, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - DRAFTS)

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return launch

    return make


def _make_compressed(backend: SDPBackend) -> Make:
    def make(_: ServingCell, x: ServingInputs) -> Launch:
        k = _in_order(x.k.transpose(1, 2), x.block_table)
        q, v = x.q.transpose(1, 2), k[..., :MLA_VALUE]

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=MLA_SCALE, enable_gqa=True)

        return launch

    return make


def _products(_: ServingCell, x: ServingInputs) -> Launch:
    k = _in_order(x.k.transpose(1, 2), x.block_table)[:, 0]
    q, v = x.q[:, 0], k[..., :MLA_VALUE]

    def launch() -> torch.Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)) * MLA_SCALE
        return torch.bmm(torch.softmax(scores, -1), v)

    return launch


def _bare_products(_: ServingCell, x: ServingInputs) -> Launch:
    k = _in_order(x.k.transpose(1, 2), x.block_table)[:, 0]
    q, v = x.q[:, 0], k[..., :MLA_VALUE]
    scores = torch.empty(*q.shape[:2], k.shape[1], dtype=q.dtype, device=q.device)
    o = torch.empty_like(q[..., :MLA_VALUE])

    def launch() -> torch.Tensor:
        torch.bmm(q, k.transpose(1, 2), out=scores)
        return torch.bmm(scores, v, out=o)

    return launch


#: Those that take part where they are named.
_NAMED = ("cudnn", "fa2", "triton")


def serving_candidates(kind: Kind, peers: Collection[str], target: str) -> list[Server]:
    """Returns who takes part in a kind of cell; the first is the one that others are compared with."""
    attnc = Server(name=OURS, title="attnc", make=_make_generated(target, kind), compiles=True, ours=True)
    on_triton = Server(
        name="triton", title="attnc on Triton", make=_make_generated("triton", kind), compiles=True
    )
    ours = [attnc] if target == "triton" else [attnc, on_triton]
    sdpa = _make_compressed if kind == "mla" else _drafts
    libraries = [
        Server(name="cudnn", title="cuDNN", make=sdpa(SDPBackend.CUDNN_ATTENTION)),
        Server(name="fa2", title="FA2", make=sdpa(SDPBackend.FLASH_ATTENTION)),
    ]
    found: list[Server]
    match kind:
        case "mla":
            products = Server(name="products", title="two products and a softmax", make=_products)
            bare = Server(name="bare", title="two products", make=_bare_products)
            found = [*ours, *libraries, products, bare]
        case "verify":
            found = [*ours, *libraries]
        case "prefix":
            cascade, plain = partial(_cascade, target), _make_generated(target, "own")
            found = [
                Server(name="cascade", title="cascade", make=cascade, compiles=True, ours=True),
                Server(name="plain", title="paged decode", make=plain, compiles=True, ours=True),
            ]
    return [who for who in found if who.name not in _NAMED or who.name in peers]


def serving_table(results: Sequence[Result[Any]], target: str) -> str:
    """Microseconds of all candidates, and how ours compares with memory's speed and with the roofline."""
    head = ("cell", "us", "GB/s", "TFLOP/s", "of roofline", "others, us")
    missing = (f"{r.cell.kind}, {name}: {why}" for r in results for name, why in r.missing.items())
    return document(table(head, (_row(result, target) for result in results)), gaps(missing))


def _row(result: Result[ServingCell], target: str) -> tuple[str, ...]:
    cell = result.cell
    titles = {who.name: who.title for who in serving_candidates(cell.kind, _NAMED, target)}
    ours = next(iter(titles))
    mine = result.timings.get(ours)
    if mine is None:
        return (cell.name, *("n/a",) * 5)
    others = (
        f"{titles[name]} {timing.median * 1e3:.1f} ({ratio(mine, timing)})"
        for name, timing in result.timings.items()
        if name != ours
    )
    seconds = mine.median * 1e-3
    return (
        cell.name,
        f"{seconds * 1e6:.1f}",
        f"{cell.bytes / seconds * 1e-9:.0f}",
        f"{cell.flops / seconds * 1e-12:.0f}",
        f"{100 * cell.roofline / seconds:.0f} %",
        ", ".join(others) or "n/a",
    )


def serving_figures(result: Result[Any]) -> dict[str, Any]:
    """Returns microseconds with quantiles, the roofline's, and why a candidate is missing."""
    cell = result.cell
    return result.figures(
        lambda name: {},
        bytes=cell.bytes,
        flops=cell.flops,
        roofline_us=round(cell.roofline * 1e6, 3),
        memory_us=round(cell.bytes / MEMORY * 1e6, 3),
    )
