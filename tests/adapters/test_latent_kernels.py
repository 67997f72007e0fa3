"""Kernels that read rows of several types as they lie, thread by thread on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.adapters import latent_kernels
from attnc.adapters.latent_rows import FORMATS, pack_rows, store_rows, unpack_cache, unpack_rows
from attnc.api.fastest import HOPPER
from attnc.verify.subject import subject_of
from tests.targets import needs_gxx
from tests.verify.judging import modules_of

SCALE = 0.07
PAGES, PAGE = 5, 8
GAP = 48


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_rows(text: str) -> Callable[..., Any]:
        (module,) = modules_of(text)
        return subject_of(module).function

    monkeypatch.setattr(latent_kernels, "compile_rows", compile_rows)


def cache_of(gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with a gap behind each page, and the latents that it stands for, [pages * page, 576]."""
    generator = torch.Generator().manual_seed(1)
    rows = pack_rows(torch.randn(PAGES, PAGE, 1, 576, generator=generator))
    memory = torch.full((PAGES, PAGE * 656 + gap), 255, dtype=torch.uint8)
    cache = memory[:, : PAGE * 656].view(PAGES, PAGE, 1, 656)
    cache.copy_(rows)
    return cache, unpack_rows(rows).reshape(-1, 576).float()


def expect(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.float() @ keys.T * SCALE
    return torch.softmax(scores, -1) @ keys[:, :512], torch.logsumexp(scores, -1)


def assert_like(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    torch.testing.assert_close(found.float(), expected, atol=limit, rtol=0)


Q = torch.randn(2, 2, 3, 576, generator=torch.Generator().manual_seed(2)).bfloat16()


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.nightly)])
def test_listed_rows(dtype: torch.dtype) -> None:
    cache, keys = cache_of(0)
    lists = torch.randint(-2, 42, (2, 2, 37), generator=torch.Generator().manual_seed(3)).to(dtype)
    counts = torch.tensor([[30, 37], [4, 0]], dtype=torch.int32)
    o, lse = latent_kernels.attend_listed(Q, cache, lists, counts, SCALE, FORMATS[656])
    for b, row in ((0, 0), (0, 1), (1, 0)):
        named = sorted({x for x in lists[b, row, : counts[b, row]].tolist() if 0 <= x < len(keys)})
        expected, of_row = expect(Q[b, row], keys[named])
        assert_like(o[b, row], expected, 0.02)
        assert_like(lse[b, row], of_row, 1e-3)
    assert torch.equal(o[1, 1], torch.zeros_like(o[1, 1]))
    assert lse[1, 1].isneginf().all()


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_rows_in_pages_of_any_stride(causal: bool) -> None:
    cache, keys = cache_of(GAP)
    table = torch.tensor([[4, 1, 2**30], [2, 3, 3]], dtype=torch.int32)
    lengths = torch.tensor([13, 24], dtype=torch.int32)
    o, lse = latent_kernels.attend_pages(Q, cache, table, lengths, SCALE, FORMATS[656], causal=causal)
    for b, length in enumerate(lengths.tolist()):
        pages = keys.view(PAGES, PAGE, 576)[table[b, : -(-length // PAGE)].long()].reshape(-1, 576)
        for row in range(2):
            expected, of_row = expect(Q[b, row], pages[: length - 1 + row if causal else length])
            assert_like(o[b, row], expected, 0.02)
            assert_like(lse[b, row], of_row, 1e-3)


def test_which_rows_a_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_kernels, "targets_on", lambda *_: (HOPPER, "triton"))
    cache, _ = cache_of(GAP)

    def reads(q: torch.Tensor = Q, rows: torch.Tensor = cache, width: int = 512) -> bool:
        return latent_kernels.reads_rows("f", q, rows, width)

    assert reads()
    assert not reads(width=448)
    assert not reads(q=Q[:0])
    assert not reads(rows=cache[:0])
    odd = torch.zeros(2 * (656 * PAGE + 8), dtype=torch.uint8).view(2, -1)[:, 8:].view(2, PAGE, 1, 656)
    assert not reads(rows=odd)
    monkeypatch.setattr(latent_kernels, "targets_on", lambda *_: ("triton",))
    assert not reads()


@pytest.mark.parametrize(
    ("size", "gap", "in_pages"),
    [(656, 0, False), (656, 16, True), (584, 0, True), (528, 0, False), (528, 16, True)],
)
def test_a_table_says_where_rows_are_that_do_not_lie_at_one_distance(
    size: int, gap: int, in_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compile_rows(text: str) -> Callable[..., Any]:
        asked.append(text)
        return lambda q, *_: (q[..., :512], q[..., 0])

    monkeypatch.setattr(latent_kernels, "compile_rows", compile_rows)
    form, counts = FORMATS[size], torch.ones(2, 2, dtype=torch.int32)
    cache = torch.zeros(PAGES, PAGE * size + gap, dtype=torch.uint8)[:, : PAGE * size].view(
        PAGES, PAGE, 1, size
    )
    q, lists = torch.zeros(2, 2, 3, form.columns), torch.zeros(2, 2, 4, dtype=torch.int32)
    for pool, paged in ((cache, in_pages), (cache[:1], form.scales_pages)):
        latent_kernels.attend_listed(q, pool, lists, counts, SCALE, form)
        assert ("via paged" in asked[-1]) == paged


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("size", [584, 528])
def test_rows_whose_scales_are_exponents(size: int, is_listed: bool) -> None:
    """Inputs of a kernel are views of what `store_rows` has filled; there is a gap behind each page."""
    page, pages, length = 8, 4, 13
    memory = torch.full((pages, page * size + 16), 255, dtype=torch.uint8)
    cache = memory[:, : page * size].view(pages, page, 1, size)
    latents = torch.randn(length, 512, generator=torch.Generator().manual_seed(5)) * 3
    table = torch.tensor([[3, 1, 2**30]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, at // page]) * page + at % page for at in range(length)])
    store_rows(latents, cache, slots)
    q = torch.randn(1, 1, 2, 512, generator=torch.Generator().manual_seed(6)).bfloat16()
    lengths = torch.tensor([length], dtype=torch.int32)
    if is_listed:
        named = torch.cat([slots, torch.tensor([-1, pages * page])]).int()[None, None]
        o, lse = latent_kernels.attend_listed(q, cache, named, lengths[None], SCALE, FORMATS[size])
    else:
        o, lse = latent_kernels.attend_pages(q, cache, table, lengths, SCALE, FORMATS[size], causal=True)
    keys = unpack_cache(cache).view(-1, 512)[slots].float()
    scores = q[0, 0].float() @ keys.T * SCALE
    assert_like(o[0, 0], torch.softmax(scores, -1) @ keys, 0.05)
    assert_like(lse[0, 0], torch.logsumexp(scores, -1), 1e-3)
