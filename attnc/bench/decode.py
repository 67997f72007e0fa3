"""`attnc bench --decode`: one new token for each sequence against its cache, which the memory bounds.

A real step finds nothing of its cache in L2, so launches rotate over copies; what a call costs the host is
timed apart. The further cells of `bench.serving` are measured in the same way, and make a table of their own.
PyTorch's peers get the cache as serving systems lay it out, [B, N, Hkv, D], transposed without a copy. None
of them reads pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.model_peers import flash3_of_vllm
from attnc.bench.peers import OURS, kernel_of
from attnc.bench.report import (
    Draw,
    Page,
    document,
    figure,
    gaps,
    grouped_bars,
    ran_on,
    ratio,
    spread,
    table,
    to_the_best,
)
from attnc.bench.run import Benchmark, Candidate, Job, Report, Result, Rotation
from attnc.bench.serving import (
    ServingCell,
    draw_serving,
    serving_candidates,
    serving_cells,
    serving_figures,
    serving_table,
)
from attnc.runtime.timing import Launch, host_ms, summarise, take_turns

SPEC = Path(__file__).parent / "specs" / "decode" / "decode.attn"
Normal: TypeAlias = Callable[..., torch.Tensor]

WIDTH, PAGE = 128, 16
#: Rows of a page that a kernel is made for: those of the tables, and smaller ones.
PAGES = (PAGE, 8, 4, 1)
_CALLS_IN_A_ROW = 200


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
        return self.batch * self.length * self.kv_heads * 2 * WIDTH * 2


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

    def narrow(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = torch.ones((), device=self.k.device)
        return self.k.to(torch.float8_e4m3fn), self.v.to(torch.float8_e4m3fn), scale

    def split_into_pages(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns k and v in pages [B * N / page, page, Hkv, D], and their table."""
        k, v = (pool.view(-1, page, *pool.shape[1:]) for pool in (self.k_pool, self.v_pool))
        return k, v, self.tables[page]


def decode_cells() -> tuple[DecodeCell, ...]:
    """Returns cells of batch 1, short and long; batches of 2k and 8k; every head its own keys; all heads the
    same keys.
    """
    shapes = (
        (1, 32, 8, 8192),
        (1, 32, 8, 131072),
        (4, 32, 8, 2048),
        (16, 32, 8, 8192),
        (64, 32, 8, 8192),
        (16, 32, 32, 8192),
        (32, 16, 1, 16384),
    )
    return tuple(DecodeCell(batch=b, heads=h, kv_heads=kv, length=n) for b, h, kv, n in shapes)


def scaling_cells() -> tuple[DecodeCell, ...]:
    """Returns one sequence that grows from 8k to 128k keys, without the two ends."""
    return tuple(DecodeCell(batch=1, heads=32, kv_heads=8, length=8192 << i) for i in range(1, 4))


#: A cache so small that the GPU never holds up the host, whose calls are timed.
CALLS = DecodeCell(batch=1, heads=32, kv_heads=8, length=1024)


def draw_decode(cell: DecodeCell, copies: int) -> tuple[DecodeInputs, ...]:
    """Returns N(0, 1) inputs on the current CUDA device."""
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


Decoder: TypeAlias = Candidate[DecodeCell, DecodeInputs]
Make: TypeAlias = Callable[[DecodeCell, DecodeInputs], Launch]


def _dense(target: str, name: str, _: DecodeCell, x: DecodeInputs) -> Launch:
    kernel = kernel_of(SPEC, target, name)
    return lambda: kernel(x.q, x.k, x.v, x.kv_len)


def _narrow(target: str, _: DecodeCell, x: DecodeInputs) -> Launch:
    kernel = kernel_of(SPEC, target, NARROW)
    k, v, scale = x.narrow()
    return lambda: kernel(x.q, k, v, x.kv_len, scale, scale)


def _narrow_pages(target: str, _: DecodeCell, x: DecodeInputs) -> Launch:
    kernel = kernel_of(SPEC, target, NARROW_PAGES)
    k, v, table = x.split_into_pages(PAGE)
    k, v, scale = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), torch.ones((), device=k.device)
    return lambda: kernel(x.q, k, v, table, x.kv_len, scale, scale)


def _make_paged(target: str, name: str, page: int, _: DecodeCell, x: DecodeInputs) -> Launch:
    kernel = kernel_of(SPEC, target, name)
    k, v, table = x.split_into_pages(page)
    return lambda: kernel(x.q, k, v, table, x.kv_len)


def _sdpa(backend: SDPBackend) -> Make:
    def make(_: DecodeCell, x: DecodeInputs) -> Launch:
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return launch

    return make


def _flex(_: DecodeCell, x: DecodeInputs) -> Launch:
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    compiled = _compiled_flex(k.shape)
    return lambda: compiled(q, k, v, enable_gqa=True)


def _own_flex(_: DecodeCell, x: DecodeInputs) -> Launch:
    from attnc.flex import flex_attention

    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    return lambda: flex_attention(q, k, v, enable_gqa=True)


@cache
def _compiled_flex(_shape: torch.Size) -> Any:
    """Compiles FlexAttention anew for each shape: PyTorch keeps eight at most, and gives up after that."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flash3_of_8_bits(_: DecodeCell, x: DecodeInputs) -> Launch:
    """Returns vLLM's FlashAttention-3 of e4m3, which multiplies in 8 bits, over pages."""
    run, (b, heads, d) = flash3_of_vllm(), (x.q.shape[0], *x.q.shape[2:])
    k, v = (pool.to(torch.float8_e4m3fn) for pool in x.split_into_pages(PAGE)[:2])
    ones = torch.ones(b, k.shape[2], device=x.q.device)
    given: dict[str, Any] = {"q": x.q.view(b, heads, d).to(torch.float8_e4m3fn), "k": k, "v": v}
    given |= {"cu_seqlens_q": torch.arange(b + 1, device=x.q.device, dtype=torch.int32), "max_seqlen_q": 1}
    given |= {"page_table": x.tables[PAGE], "seqused_k": x.kv_len, "max_seqlen_k": x.k.shape[1]}
    given |= {"softmax_scale": d**-0.5, "is_causal": True}
    return partial(run, **given, q_descale=ones, k_descale=ones, v_descale=ones)


#: FlashAttention-3 of 8 bits, where it is named.
FLASH3_OF_8_BITS = "fa3_e4m3"
#: What PyTorch brings along, and vLLM; and attnc's function of the name of PyTorch's.
PEERS: tuple[Decoder, ...] = (
    Decoder(name="cudnn", title="cuDNN", make=_sdpa(SDPBackend.CUDNN_ATTENTION)),
    Decoder(name="fa2", title="FlashAttention-2", make=_sdpa(SDPBackend.FLASH_ATTENTION)),
    Decoder(name="flex", title="FlexAttention", make=_flex, compiles=True),
    Decoder(name="attnc_flex", title="attnc.flex", make=_own_flex, compiles=True, ours=True),
    Decoder(name=FLASH3_OF_8_BITS, title="FlashAttention-3, e4m3", make=_flash3_of_8_bits),
)
#: Attentions over pages by the rows of one. Those of fewer than 16 take part where they are named.
PAGED = {page: "paged" if page == PAGE else f"page_{page}" for page in PAGES}
#: Keys and values of 8 bits, half the bytes, where it is named; `cuda.sm_80` has no kernels for them.
NARROW = "e4m3"
NARROW_PAGES = f"page_{PAGE}_{NARROW}"
#: All names that `decoders` knows.
NAMES = frozenset({"triton", NARROW, NARROW_PAGES, *PAGED.values(), *(peer.name for peer in PEERS)})


def decoders(names: Collection[str], target: str) -> tuple[Decoder, ...]:
    """Returns attnc's kernels for a target, those for Triton beside them where `triton` is named, and the
    peers of these names. Unknown names are left to the caller.
    """
    is_beside = "triton" in names and target != "triton"
    beside = _ours("triton", names, "triton_", " on Triton") if is_beside else ()
    peers = (peer for peer in PEERS if peer.name in names)
    return (*_ours(target, names), *beside, *peers)


def _ours(target: str, names: Collection[str], prefix: str = "", suffix: str = "") -> Iterator[Decoder]:
    makers: dict[str, tuple[str, Make]] = {"attnc": ("attnc", partial(_dense, target, "dense"))}
    for page, name in PAGED.items():
        if page == PAGE or name in names:
            makers[name] = f"page {page}", partial(_make_paged, target, name, page)
    if NARROW in names and target != "cuda.sm_80":
        makers[NARROW] = NARROW, partial(_narrow, target)
    if NARROW_PAGES in names and target != "cuda.sm_80":
        makers[NARROW_PAGES] = f"{NARROW}, page {PAGE}", partial(_narrow_pages, target)
    makers["unified"] = "unified_max", partial(_dense, target, "unified")
    for name, (title, make) in makers.items():
        yield Decoder(name=f"{prefix}{name}", title=f"{title}{suffix}", make=make, compiles=True, ours=True)


Results: TypeAlias = Sequence[Result[DecodeCell | ServingCell]]


@dataclass(frozen=True, kw_only=True)
class DecodeBenchmark(Rotation[DecodeCell | ServingCell, Any], Benchmark[DecodeCell | ServingCell, Results]):
    """peers: names of `NAMES`; others have no part here."""

    stem: ClassVar[str] = "decode"
    peers: Collection[str]
    target: str = "triton"

    @property
    def cells(self) -> Sequence[DecodeCell | ServingCell]:
        return (*decode_cells(), *scaling_cells(), *serving_cells())

    def describe(self, cell: DecodeCell | ServingCell) -> str:
        return f"{cell.name:26} {cell.bytes * 1e-9:9.3f} GB of K and V"

    def candidates(self, cell: DecodeCell | ServingCell) -> Sequence[Candidate[Any, Any]]:
        """Returns who takes part in a cell. FlexAttention gives one sequence to a few programs: how long it
        takes for longer ones goes without saying.
        """
        if isinstance(cell, ServingCell):
            return serving_candidates(cell.kind, self.peers, self.target)
        taking = decoders(self.peers, self.target)
        return [who for who in taking if who.name != "flex" or cell not in scaling_cells()]

    def copies(self, cell: DecodeCell | ServingCell) -> int:
        return 1 if cell == CALLS else super().copies(cell)

    def draw(self, cell: DecodeCell | ServingCell, copies: int) -> Sequence[Any]:
        return draw_serving(cell, copies) if isinstance(cell, ServingCell) else draw_decode(cell, copies)

    def ready(self, cell: DecodeCell | ServingCell, launches: Sequence[Launch]) -> Launch:
        if cell != CALLS:
            return super().ready(cell, launches)
        (launch,) = launches
        launch()
        launch()
        return launch

    def time_cell(
        self,
        cell: DecodeCell | ServingCell,
        launches: Mapping[str, Launch],
        missing: Mapping[str, str],
        rounds: int,
    ) -> Result[DecodeCell | ServingCell]:
        if cell != CALLS:
            return super().time_cell(cell, launches, missing, rounds)
        calls = {name: partial(host_ms, launch, _CALLS_IN_A_ROW) for name, launch in launches.items()}
        timings = {name: summarise(samples) for name, samples in take_turns(calls, rounds).items()}
        return Result(cell=cell, timings=timings, missing=missing)

    def jobs(self, cells: Sequence[DecodeCell | ServingCell]) -> Sequence[Job]:
        """Warms up one of each kind of further cells, as no length or batch compiles a kernel anew."""
        first = {cell.kind: cell for cell in reversed(cells) if isinstance(cell, ServingCell)}
        return super().jobs([*(cell for cell in cells if isinstance(cell, DecodeCell)), *first.values()])

    def steps(self, cells: Sequence[DecodeCell | ServingCell], rounds: int) -> int:
        return len(cells) + 1

    def measure(self, cells: Sequence[DecodeCell | ServingCell], rounds: int, report: Report) -> Results:
        """Times calls too, if any cell is one of decoding alone."""
        with_calls = any(isinstance(cell, DecodeCell) for cell in cells)
        return super().measure((*cells, CALLS) if with_calls else cells, rounds, report)

    def page(self, results: Results, machine: Mapping[str, str]) -> Page:
        plain = [r for r in results if isinstance(r.cell, DecodeCell) and r.cell != CALLS]
        further = [r for r in results if isinstance(r.cell, ServingCell)]
        calls = [r.timings for r in results if r.cell == CALLS]
        eager = {name: timing.median * 1e3 for timings in calls for name, timing in timings.items()}
        taking = decoders(self.peers, self.target)
        return Page(
            markdown=f"{_markdown(plain, eager, taking, machine)}\n{serving_table(further, self.target)}",
            data={
                "format": 1,
                "machine": dict(machine),
                "cells": [_figures(result) for result in plain],
                "serving": [serving_figures(result) for result in further],
                "eager_us": {name: round(microseconds, 2) for name, microseconds in eager.items()},
            },
            draw=_draw(plain, taking, machine["device"]) if plain else None,
        )


def _markdown(
    results: Sequence[Result[Any]],
    eager: Mapping[str, float],
    taking: Sequence[Decoder],
    machine: Mapping[str, str],
) -> str:
    head = ["decode, bf16, d128", "us", *(who.title for who in taking)]
    head += ["to the best", "pages to tensor", "spread"]
    calls = ", ".join(f"{who.title} {eager[who.name]:.1f}" for who in taking if who.name in eager)
    return document(
        [ran_on(machine)],
        [
            "Medians of interleaved rounds in GB/s of K and V, under CUDA graph replay with a cold L2;",
            "spread is the width of the middle 80 % of the samples.",
        ],
        table(head, (_row(result, taking) for result in results)),
        [f"Microseconds of the host for an eager call: {calls}."],
        gaps(f"{name}: {reason}" for result in results for name, reason in result.missing.items()),
    )


def _row(result: Result[Any], taking: Sequence[Decoder]) -> list[str]:
    ours, timings = result.timings.get(OURS), result.timings
    return [
        result.cell.name,
        figure(ours.median * 1e3 if ours else None, ".1f"),
        *(figure(_speed(result, who.name)) for who in taking),
        to_the_best(timings, OURS, (who.name for who in PEERS if who.name != FLASH3_OF_8_BITS)),
        ratio(timings.get("paged"), ours, ".3f", ""),
        spread(ours),
    ]


def _figures(result: Result[Any]) -> dict[str, Any]:
    return result.figures(
        lambda name: {"gb_s": round(_speed(result, name) or 0.0, 1)}, bytes=result.cell.bytes
    )


def _speed(result: Result[Any], name: str) -> float | None:
    narrow = name.removeprefix("triton_") in (NARROW, NARROW_PAGES, FLASH3_OF_8_BITS)
    return result.rate(result.cell.bytes // (2 if narrow else 1), name, 1e9)


def _draw(results: Sequence[Result[Any]], taking: Sequence[Decoder], device: str) -> Draw:
    def draw(plt: Any) -> Any:
        made, (bars, growth) = plt.subplots(1, 2, figsize=(12, 1 + 0.75 * len(results)), width_ratios=(3, 2))
        speeds = {who.title: [_speed(r, who.name) or 0.0 for r in results] for who in taking}
        grouped_bars(bars, [r.cell.name for r in results], speeds)
        bars.set_xlabel("GB/s of K and V (longer is faster)")
        bars.set_title(f"Decode, bf16, {device}")
        _growth(growth, results, taking)
        growth.spines[["top", "right"]].set_visible(False)
        made.tight_layout()
        return made

    return draw


def _growth(axes: Any, results: Sequence[Result[Any]], taking: Sequence[Decoder]) -> None:
    single = sorted((r for r in results if r.cell.batch == 1), key=lambda r: r.cell.length)
    for who in taking:
        points = [(r.cell.length, r.timings[who.name].median * 1e3) for r in single if who.name in r.timings]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=who.title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys")
    axes.set_ylabel("microseconds, batch 1")
    axes.legend(loc="upper left", fontsize="small")
