"""FlashMLA's functions against their meaning in float64: selected keys of prompts and caches; all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.adapters import flash_mla
from attnc.adapters.flash_mla import (
    _max_logits,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from attnc.adapters.latent_rows import FORMATS, store_rows, unpack_cache

D, DV = 48, 32
SCALE = 0.2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def attend(
    q: torch.Tensor, keys: torch.Tensor, named: torch.Tensor, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns o, the largest scores and lse of q [M, H, D] over keys [N, D] that are named [M, N]."""
    scores = torch.einsum("mhd,nd->mhn", q.double(), keys.double()) * SCALE
    scores = scores.masked_fill(~named[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.double())
    weights = torch.exp(scores - torch.where(whole == -torch.inf, torch.inf, whole)[..., None])
    o = torch.einsum("mhn,nd->mhd", weights, keys.double()[:, :DV])
    return o, scores.amax(-1), torch.where(lse == -torch.inf, torch.inf, lse)


def named_by(lists: torch.Tensor, counts: torch.Tensor | None, keys: int) -> torch.Tensor:
    found = torch.zeros(len(lists), keys, dtype=torch.bool)
    for row, entries in enumerate(lists.tolist()):
        for entry in entries if counts is None else entries[: max(int(counts[row]), 0)]:
            if 0 <= entry < keys:
                found[row, entry] = True
    return found


def assert_like(found: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=8e-3)


#: Keys in any order, twice, none at all, and entries that name no key.
LISTS = torch.tensor(
    [[3, 0, 39, 7], [-1, -1, -1, -1], [40, 5, -7, 2**31 - 1], [6, 6, 6, 1], [12, 11, -1, 10]],
    dtype=torch.int32,
)


@pytest.mark.parametrize("heads", [1, 3, 20])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("sunk", [False, True])
def test_selected_keys_of_a_prompt(heads: int, counted: bool, sunk: bool) -> None:
    q, kv = random(5, heads, D), random(40, 1, D, seed=1)
    counts = torch.tensor([4, 2, 2, 0, 9], dtype=torch.int32) if counted else None
    sink = torch.linspace(-3, 4, heads) if sunk else None
    o, largest, lse = flash_mla_sparse_fwd(
        q, kv, LISTS[:, None], SCALE, DV, sink, counts, wants_max_logits=True
    )
    expected, scores, of_rows = attend(q, kv[:, 0], named_by(LISTS, counts, 40), sink)
    assert (o.dtype, lse.dtype, o.shape) == (torch.bfloat16, torch.float32, (5, heads, DV))
    assert_like(o, expected, 0.02)
    assert_like(lse, of_rows, 1e-4)
    assert largest is not None
    assert_like(largest, scores, 1e-4)


def test_a_sink_of_infinity_leaves_nothing_and_one_of_minus_infinity_all() -> None:
    q, kv = random(5, 2, D), random(40, 1, D, seed=1)
    plain, _, lse = flash_mla_sparse_fwd(q, kv, LISTS[:, None], SCALE, DV)
    sink = torch.tensor([torch.inf, -torch.inf])
    o, _, same = flash_mla_sparse_fwd(q, kv, LISTS[:, None], SCALE, DV, sink)
    assert not o[:, 0].any()
    assert torch.equal(o[:, 1], plain[:, 1])
    assert torch.equal(lse, same)


def test_lists_of_64_bits_are_taken() -> None:
    q, kv = random(5, 3, D), random(40, 1, D, seed=1)
    o, _, _ = flash_mla_sparse_fwd(q, kv, LISTS[:, None].long(), SCALE, DV)
    assert_like(o, attend(q, kv[:, 0], named_by(LISTS, None, 40))[0], 0.02)


@pytest.mark.parametrize("tokens", [1, 2])
def test_selected_rows_of_a_cache(tokens: int) -> None:
    q, cache = random(2, tokens, 4, D), random(5, 8, 1, D, seed=1)
    lists = torch.stack([LISTS[:tokens], LISTS[3 : 3 + tokens]])
    counts = torch.tensor([3, 4], dtype=torch.int32)
    meta, splits = get_mla_metadata()
    o, lse = flash_mla_with_kvcache(
        q, cache, None, None, DV, meta, splits, SCALE, indices=lists, topk_length=counts
    )
    for b in range(2):
        named = named_by(lists[b], counts[b].expand(tokens), 40)
        expected, _, of_rows = attend(q[b], cache.reshape(40, D), named)
        assert_like(o[b], expected, 0.02)
        assert_like(lse[b].T, of_rows, 1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_all_keys_of_a_cache(causal: bool) -> None:
    q, cache = random(2, 2, 4, D), random(8, 16, 1, D, seed=1)
    table, lengths = (
        torch.tensor([[5, 1], [0, 7]], dtype=torch.int32),
        torch.tensor([20, 3], dtype=torch.int32),
    )
    meta, _ = get_mla_metadata()
    o, lse = flash_mla_with_kvcache(q, cache, table, lengths, DV, meta, None, SCALE, causal)
    for b, length in enumerate(lengths.tolist()):
        keys = cache[table[b].long()].reshape(32, D)
        places = torch.arange(32)
        named = (places < length).expand(2, 32)
        if causal:
            named = named & (places <= (torch.arange(2) + length - 2)[:, None])
        expected, _, of_rows = attend(q[b], keys, named)
        assert_like(o[b], expected, 0.02)
        assert_like(lse[b].T, of_rows, 1e-4)


SIZES = list(FORMATS)


def packed(pages: int, page: int, size: int = 656, *, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of rows of so many bytes, in pages with a gap between them, and one of 16 bits of the same."""
    memory = torch.zeros(pages, page * size + 64, dtype=torch.uint8)
    cache = memory[:, : page * size].view(pages, page, 1, size)
    store_rows(random(pages * page, FORMATS[size].columns, seed=seed), cache, torch.arange(pages * page))
    return cache, unpack_cache(cache)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 2])
def test_selected_rows_of_several_types_are_those_of_16_bits(tokens: int, size: int) -> None:
    q, (cache, wide) = random(2, tokens, 3, FORMATS[size].columns), packed(5, 8, size)
    lists = torch.stack([LISTS[2 : 2 + tokens], LISTS[:tokens]])
    counts = torch.tensor([3, 4], dtype=torch.int32)
    given: dict[str, Any] = {"softmax_scale": SCALE, "topk_length": counts}
    found = flash_mla_with_kvcache(q, cache, None, None, 512, is_fp8_kvcache=True, indices=lists, **given)
    expected = flash_mla_with_kvcache(q, wide, None, None, 512, indices=lists, **given)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("counted", [False, True])
def test_a_second_cache_adds_its_keys(counted: bool, size: int) -> None:
    """As those of one cache that holds the pages of both."""
    q = random(2, 2, 3, FORMATS[size].columns)
    (window, first), (compressed, second) = packed(5, 8, size), packed(3, 4, size, seed=9)
    lists = torch.stack([LISTS[:2], LISTS[3:5]])
    others = torch.tensor([[[11, 3, -1], [0, 0, 12]], [[-1] * 3, [5, 3, 4]]], dtype=torch.int64)
    counts = (torch.tensor([3, 2], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    lengths: dict[str, Any] = {}
    if counted:
        lengths = {"topk_length": counts[0], "extra_topk_length": counts[1]}
    found = flash_mla_with_kvcache(
        q,
        window,
        None,
        None,
        512,
        softmax_scale=SCALE,
        is_fp8_kvcache=True,
        indices=lists,
        extra_k_cache=compressed,
        extra_indices_in_kvcache=others,
        **lengths,
    )
    counted_of = [
        torch.where(torch.arange(x.shape[-1]) < count[:, None, None], x, -1) if counted else x
        for x, count in zip((lists, others), counts, strict=True)
    ]
    inside = [(x >= 0) & (x < rows) for x, rows in zip(counted_of, (40, 12), strict=True)]
    both = [torch.where(seen, x + at, -1) for seen, x, at in zip(inside, counted_of, (0, 40), strict=True)]
    pool = torch.cat([first.flatten(0, 1), second.flatten(0, 1)])[None]
    expected = flash_mla_with_kvcache(
        q, pool, None, None, 512, softmax_scale=SCALE, indices=torch.cat(both, -1).int()
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", SIZES)
def test_all_rows_of_several_types_are_those_of_16_bits(size: int) -> None:
    """Two sequences share their first page."""
    q, (cache, wide) = random(2, 2, 3, FORMATS[size].columns), packed(8, 16, size)
    table = torch.tensor([[5, 1], [5, 2**31 - 1]], dtype=torch.int32)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    rows = cache.view(torch.float8_e4m3fn)
    found = flash_mla_with_kvcache(q, rows, table, lengths, 512, None, None, SCALE, True, True)
    expected = flash_mla_with_kvcache(q, wide, table, lengths, 512, None, None, SCALE, True)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def with_extra(
    cache: torch.Tensor,
    lists: torch.Tensor | None = LISTS[None, :1],
    counts: torch.Tensor | None = None,
    *,
    size: int = 656,
) -> Any:
    return flash_mla_with_kvcache(
        random(1, 1, 2, FORMATS[size].columns),
        packed(2, 2, size)[0],
        None,
        None,
        512,
        is_fp8_kvcache=True,
        indices=LISTS[None, :1],
        extra_k_cache=cache,
        extra_indices_in_kvcache=lists,
        extra_topk_length=counts,
    )


Q, KV = random(5, 2, D), random(40, 1, D)
CACHE = random(5, 8, 1, D)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: flash_mla_sparse_fwd(Q, KV, LISTS, SCALE),
            ValueError,
            r"indices: expected shape \[5, 1, topk\]",
        ),
        (lambda: flash_mla_sparse_fwd(Q, KV, LISTS[:4, None], SCALE), ValueError, "indices: expected shape"),
        (lambda: flash_mla_sparse_fwd(Q, KV.float(), LISTS[:, None], SCALE), TypeError, "kv: expected dtype"),
        (
            lambda: flash_mla_sparse_fwd(Q, KV[..., 1:], LISTS[:, None], SCALE),
            ValueError,
            "kv: expected shape",
        ),
        (lambda: flash_mla_sparse_fwd(Q, KV, LISTS[:, None].float(), SCALE), TypeError, "indices: expected"),
        (
            lambda: flash_mla_sparse_fwd(Q, KV, LISTS[:, None], SCALE, DV, torch.zeros(3)),
            ValueError,
            "attn_sink: expected shape",
        ),
        (
            lambda: flash_mla_sparse_fwd(Q, KV, LISTS[:, None], SCALE, topk_length=torch.ones(5)),
            TypeError,
            "topk_length: expected dtype torch.int32",
        ),
        (
            lambda: flash_mla_sparse_fwd(Q, KV, LISTS[:, None], SCALE, indexer_topk=512),
            ValueError,
            "indexer_topk: expected None",
        ),
        (
            lambda: flash_mla_with_kvcache(Q[None], CACHE, None, None, DV, is_fp8_kvcache=True),
            TypeError,
            "k_cache: expected dtype torch.uint8 or torch.float8_e4m3fn",
        ),
        (
            lambda: flash_mla_with_kvcache(Q[None], packed(1, 2)[0], None, None, DV, is_fp8_kvcache=True),
            ValueError,
            r"q: expected torch.bfloat16 \[..., 576\] beside such rows",
        ),
        (
            lambda: flash_mla_with_kvcache(
                random(1, 1, 2, 576), packed(2, 2)[0].transpose(0, 1), None, None, DV, is_fp8_kvcache=True
            ),
            ValueError,
            "k_cache: expected rows that follow each other",
        ),
        (
            lambda: flash_mla_with_kvcache(
                Q[None], CACHE, None, None, DV, indices=LISTS[None], extra_k_cache=CACHE
            ),
            ValueError,
            "extra_k_cache: expected None",
        ),
        (
            lambda: with_extra(packed(2, 2, 528)[0], size=584),
            ValueError,
            "extra_k_cache: expected rows of 584 bytes",
        ),
        (
            lambda: with_extra(packed(2, 2)[0], None),
            ValueError,
            "extra_indices_in_kvcache: expected a tensor",
        ),
        (
            lambda: with_extra(packed(2, 2)[0], LISTS[None, :2]),
            ValueError,
            r"extra_indices_in_kvcache: expected shape \[1, 1, extra\]",
        ),
        (
            lambda: with_extra(packed(2, 2)[0], LISTS[None, :1].float()),
            TypeError,
            "extra_indices_in_kvcache: expected dtype torch.int32",
        ),
        (
            lambda: with_extra(packed(2, 2)[0], LISTS[None, :1], torch.ones(2)),
            TypeError,
            "extra_topk_length: expected dtype torch.int32",
        ),
        (lambda: flash_mla_with_kvcache(Q[None], CACHE, None, None, DV), ValueError, "block_table: expected"),
        (
            lambda: flash_mla_with_kvcache(Q[None], CACHE[:, :6], None, None, DV, indices=LISTS[None]),
            ValueError,
            "k_cache: expected pages that follow each other",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_largest_scores_of_no_keys_are_minus_infinity() -> None:
    q, keys = torch.randn(3, 2, 4), torch.randn(5, 4)
    lists, counts = torch.tensor([[4, 0, -1], [2, 7, 1], [3, 3, 3]]), torch.tensor([3, 2, 0])
    scores = torch.einsum("mhd,sd->mhs", q, keys) * 0.5
    expected = torch.stack([scores[0][:, [4, 0]].amax(-1), scores[1][:, 2], torch.full((2,), -torch.inf)])
    torch.testing.assert_close(_max_logits(q, keys, lists, counts, 0.5), expected)
    for some, few in ((lists[:, :0], keys), (lists, keys[:0]), (lists[:, :0], keys[:0])):
        found = _max_logits(q, few, some, counts, 0.5)
        assert found.shape == (3, 2)
        assert found.isneginf().all()


def test_kernels_are_those_of_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(flash_mla, "kernel", made.append)
    flash_mla._selected_kernel.__wrapped__(torch.bfloat16, 576, 512, 0.1, True, 16, 0)
    flash_mla._paged_kernel.__wrapped__(torch.bfloat16, 576, 512, 0.1, 64, True, 16)
    assert [(wanted.decode, wanted.rows) for wanted in made] == [(True, 16), (True, 16)]


def test_rows_that_a_kernel_reads_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several types, of a call with pages and of one with lists, and no others."""
    asked: list[str] = []

    def kernel_of(name: str) -> Any:
        def attend(q: torch.Tensor, *given: Any, **options: Any) -> Any:
            asked.append(name)
            return torch.zeros(*q.shape[:-1], 512), torch.zeros(q.shape[:-1])

        return attend

    for name in ("attend_pages", "attend_listed", "_attend_all", "_attend"):
        monkeypatch.setattr(flash_mla, name, kernel_of(name.removeprefix("_attend")))
    monkeypatch.setattr(flash_mla, "_attend_all", lambda name, q, *_: kernel_of("all")(q))
    monkeypatch.setattr(flash_mla, "_attend", lambda name, q, *_: kernel_of("selected")(q))
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.full((1,), 9, dtype=torch.int32)
    lists = torch.zeros(1, 1, 4, dtype=torch.int32)
    for size, reads in ((656, True), (656, False), (584, True)):
        monkeypatch.setattr(flash_mla, "reads_rows", lambda *_, **__: reads)  # noqa: B023  # called at once
        q, (cache, wide) = random(1, 1, 2, FORMATS[size].columns), packed(1, 16, size)
        for is_narrow, pool in ((True, cache), (False, wide)):
            for indices in (None, lists):
                asked.clear()
                flash_mla_with_kvcache(
                    q, pool, table, lengths, 512, is_fp8_kvcache=is_narrow, indices=indices
                )
                ways = ("attend_pages", "all") if indices is None else ("attend_listed", "selected")
                assert asked == [ways[not (is_narrow and reads)]]
