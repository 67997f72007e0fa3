"""`attnc bench --prefill`: tokens of many sequences at once, causal, with grouped heads.

The same q, k and v serve all forms: `dense` in one tensor, where all prompts are as long; `ragged` end to
end; `page_16` and `page_64` with queries end to end and keys in pages of a pool, in random order; smaller
pages likewise, where they are named. So the work is equal, and what a form costs is what it takes longer than
`dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from attnc.bench.peers import OURS, kernel_of, need_flash3
from attnc.bench.report import IN_TFLOPS, Page, document, figure, gaps, ran_on, ratio, spread, table
from attnc.bench.run import Benchmark, Candidate, Contest, Job, Result, Unavailable
from attnc.runtime.timing import Launch

SPEC = Path(__file__).parent / "specs" / "prefill" / "prefill.attn"
WIDTH, HEADS, KV_HEADS = 128, 32, 8
#: Rows of a page that kernels are made for: those of the tables, and smaller ones.
PAGES = (16, 64, 4, 1)
FORMS = ("dense", "ragged", *(f"page_{page}" for page in PAGES))
#: Those that take part where they are named.
SMALL = tuple(f"page_{page}" for page in PAGES if page < 16)
_TOKENS = 16384
#: By who takes part; the first is the one that others are compared with.
_TITLES = {OURS: "attnc", "triton": "attnc on Triton", "fa3": "FlashAttention-3"}


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
        return len(set(self.lengths)) == 1

    @property
    def flops(self) -> float:
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
        """Returns q, k and v as [B, N, heads, D], which takes prompts of one length."""
        q, k, v = (x.reshape(len(self.lengths), -1, *x.shape[1:]) for x in (self.q, self.k, self.v))
        return q, k, v


def prefill_cells() -> tuple[PrefillCell, ...]:
    """Returns 16k tokens in prompts of one length, and in 16 that differ."""
    equal = (PrefillCell(lengths=(length,) * (_TOKENS // length)) for length in (1024, 4096, 16384))
    return (*equal, PrefillCell(lengths=tuple(range(64, 2048, 128))))


def draw_prefill(cell: PrefillCell, device: str = "cuda") -> PrefillInputs:
    """Returns N(0, 1) inputs."""
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


def _need_equal(form: str, cell: PrefillCell) -> None:
    if form == "dense" and not cell.is_equal:
        raise Unavailable("prompts of different lengths")


def _make_generated(target: str, form: str, cell: PrefillCell, x: PrefillInputs) -> Launch:
    _need_equal(form, cell)
    kernel = kernel_of(SPEC, target, form)
    if form == "dense":
        return partial(kernel, *x.dense())
    if form == "ragged":
        return partial(kernel, x.q, x.k, x.v, x.cu, x.cu)
    k, v, table = x.paged[_page(form)]
    return partial(kernel, x.q, k, v, x.cu, table, x.lengths)


def _flash3(form: str, cell: PrefillCell, x: PrefillInputs) -> Launch:
    _need_equal(form, cell)
    need_flash3()
    forward = partial(torch.ops.flash_attn_3.fwd, softmax_scale=WIDTH**-0.5, is_causal=True)
    if form == "dense":
        return partial(forward, *x.dense())
    packed: dict[str, Any] = {"cu_seqlens_q": x.cu, "max_seqlen_q": x.longest, "max_seqlen_k": x.longest}
    if form == "ragged":
        return partial(forward, x.q, x.k, x.v, cu_seqlens_k=x.cu, **packed)
    k, v, table = x.paged[_page(form)]
    return partial(forward, x.q, k, v, seqused_k=x.lengths, page_table=table, num_splits=1, **packed)


def _page(form: str) -> int:
    return next(page for page in PAGES if form == f"page_{page}")


Attendant: TypeAlias = Candidate[PrefillCell, PrefillInputs]


@dataclass(frozen=True, kw_only=True)
class PrefillBenchmark(
    Contest[PrefillCell, PrefillInputs], Benchmark[PrefillCell, Sequence[Result[PrefillCell]]]
):
    """A candidate is called by who it is and its form, `fa3 page_16`. peers: of them triton, fa3 and small
    pages.
    """

    stem: ClassVar[str] = "prefill"
    peers: Collection[str]
    target: str = "triton"

    @property
    def cells(self) -> Sequence[PrefillCell]:
        return prefill_cells()

    @property
    def forms(self) -> Sequence[str]:
        return [form for form in FORMS if form not in SMALL or form in self.peers]

    def describe(self, cell: PrefillCell) -> str:
        return f"{cell.name:26} {cell.flops * 1e-9:9.1f} GFLOP"

    def candidates(self, cell: PrefillCell) -> Sequence[Attendant]:
        makers: dict[str, Callable[..., Launch]] = {OURS: partial(_make_generated, self.target)}
        if "triton" in self.peers and self.target != "triton":
            makers["triton"] = partial(_make_generated, "triton")
        if "fa3" in self.peers:
            makers["fa3"] = _flash3
        return [
            Attendant(
                name=f"{who} {form}",
                title=f"{_TITLES[who]}, {form}",
                make=partial(make, form),
                compiles=who == OURS,
                ours=who == OURS,
            )
            for who, make in makers.items()
            for form in self.forms
        ]

    def draw(self, cell: PrefillCell, copies: int) -> Sequence[PrefillInputs]:
        return [draw_prefill(cell) for _ in range(copies)]

    def jobs(self, cells: Sequence[PrefillCell]) -> Sequence[Job]:
        """Warms up one short prompt in each form, as no length compiles a kernel anew."""
        return super().jobs([PrefillCell(lengths=(256,))])

    def page(self, results: Sequence[Result[PrefillCell]], machine: Mapping[str, str]) -> Page:
        return Page(
            markdown=self._markdown(results, machine),
            data={
                "format": 1,
                "machine": dict(machine),
                "cells": [_figures(result) for result in results],
            },
        )

    def _markdown(self, results: Sequence[Result[PrefillCell]], machine: Mapping[str, str]) -> str:
        timed = {name.split()[0] for result in results for name in result.timings}
        others = [who for who in _TITLES if who != OURS and who in timed]
        head = ["prompts", "keys", "us", "attnc", "spread", "to dense", *(_TITLES[who] for who in others)]
        head += [f"to {_TITLES[who]}" for who in others]
        titles = {f"{who} {form}": f"{title}, {form}" for who, title in _TITLES.items() for form in FORMS}
        reasons = (f"{titles[name]}: {why}" for result in results for name, why in result.missing.items())
        return document(
            [ran_on(machine)],
            [IN_TFLOPS],
            table(head, (_row(result, form, others) for result in results for form in self.forms)),
            gaps(reasons),
        )


def _row(result: Result[PrefillCell], form: str, others: Sequence[str]) -> list[str]:
    flops, timings = result.cell.flops, result.timings
    ours = timings.get(f"{OURS} {form}")
    return [
        result.cell.name,
        form.replace("_", " "),
        figure(ours.median * 1e3 if ours else None, ".1f"),
        figure(result.rate(flops, f"{OURS} {form}")),
        spread(ours),
        ratio(ours, timings.get(f"{OURS} dense")),
        *(figure(result.rate(flops, f"{who} {form}")) for who in others),
        *(ratio(ours, timings.get(f"{who} {form}")) for who in others),
    ]


def _figures(result: Result[PrefillCell]) -> dict[str, Any]:
    flops = result.cell.flops
    return result.figures(lambda name: {"tflops": round(result.rate(flops, name) or 0.0, 1)}, flops=flops)
