"""Keys and values of new tokens that FlashInfer's functions write into pages."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from attnc.adapters.flashinfer.page import _find_slots
from attnc.api.tensors import GivenTensors
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, SIZES, compare, stored, workspace
from tests.adapters.oracle import attend

INDICES = torch.tensor([5, 0, 7, 2, 3]).int()


@pytest.mark.parametrize("form", ["NHD-together", "HND-apart"])
def test_decoding_reads_what_was_appended(form: str) -> None:
    layout = form[:3]
    k, v = torch.full((2, 8, PAGE, HEADS, SIZE), torch.nan)
    cache: Any = stored(k, v, form)
    held = [[torch.zeros(0, HEADS, SIZE)] * 2 for _ in range(3)]  # k and v of three requests
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for counts in ([3, 6, 0], [2, 1, 4]):
        new = torch.randn(2, sum(counts), HEADS, SIZE)
        for b, parts in enumerate(zip(*(x.split(counts) for x in new), strict=True)):
            held[b] = [torch.cat(pair) for pair in zip(held[b], parts, strict=True)]
        lengths = torch.tensor([len(x) for x, _ in held])
        pages = -(-lengths // PAGE)
        indptr, last = torch.cat([torch.zeros(1).long(), pages.cumsum(0)]).int(), (lengths - 1) % PAGE + 1
        indices = torch.cat([INDICES[at : at + n] for at, n in zip((0, 2, 4), pages.tolist(), strict=True)])
        tables = indptr, indices, last
        if all(counts):
            assert torch.equal(get_seq_lens(indptr, last, PAGE), lengths)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        at = get_batch_indices_positions(starts, lengths, sum(counts) + 2)  # and two rows of padding
        k, v = (torch.cat([x, torch.full((2, HEADS, SIZE), torch.nan)]) for x in new)
        append_paged_kv_cache(k, v, *at, cache, indices, indptr, last, layout)
    q = torch.randn(3, HEADS * GROUP, SIZE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    assert tables is not None
    wrapper.plan(*tables, head_dim=SIZE, **SIZES)
    o, lse = wrapper.run(q, cache, return_lse=True)
    for b, (x, y) in enumerate(held):
        compare(o[b : b + 1], lse[b : b + 1], attend(q[b : b + 1], x, y, scale=SIZE**-0.5))


def test_where_tokens_stand() -> None:
    into = torch.empty(2, 10, dtype=torch.int32)
    found = get_batch_indices_positions(
        torch.tensor([0, 1, 1, 4, 7]).int(), torch.tensor([5, 9, 3, 8]), 10, *into
    )
    assert found[0].data_ptr() == into[0].data_ptr()
    assert found[0].tolist() == [0, 2, 2, 2, 3, 3, 3, -1, -1, -1]
    assert found[1].tolist() == [4, 0, 1, 2, 5, 6, 7, 0, 0, 0]


def test_latents_and_numbers_of_8_bits_go_as_they_are() -> None:
    dtype = torch.float8_e4m3fn
    caches = torch.zeros(3, PAGE, 8).to(dtype), torch.zeros(3, PAGE, 4).to(dtype)
    rows = torch.randn(3, 8).to(dtype), torch.randn(3, 4).to(dtype)
    at = torch.tensor([0, 0, 1]), torch.tensor([3, 4, 0])
    tables = torch.tensor([2, 0, 1]).int(), torch.tensor([0, 2, 3]).int(), torch.tensor([1, 1]).int()
    append_paged_mla_kv_cache(*rows, *at, *caches, *tables)
    for x, cache in zip(rows, caches, strict=True):
        found = torch.stack([cache[2, 3], cache[0, 0], cache[1, 0]])
        assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))
        assert int(cache.view(torch.uint8).any(-1).sum()) == 3


def test_arguments_are_named() -> None:
    rows, cache = torch.ones(2, HEADS, SIZE), torch.zeros(3, 2, PAGE, HEADS, SIZE)
    tables = (
        torch.zeros(2).int(),
        torch.zeros(2).int(),
        cache,
        torch.arange(3).int(),
        torch.tensor([0, 3]).int(),
    )
    with pytest.raises(ValueError, match=r"append_value: expected shape \[2, 2, 16\], got \[1, 2, 16\]"):
        append_paged_kv_cache(rows, rows[:1], *tables, torch.ones(1).int())
    with pytest.raises(TypeError, match=r"append_key: expected dtype torch\.float32, like the cache"):
        append_paged_kv_cache(rows.half(), rows, *tables, torch.ones(1).int())
    with pytest.raises(TypeError, match="positions: expected dtype"):
        append_paged_kv_cache(rows, rows, tables[0], rows[:, 0, 0], *tables[2:], torch.ones(1).int())
    with pytest.raises(ValueError, match="kv_layout: expected 'NHD' or 'HND', got 'DHN'"):
        append_paged_kv_cache(rows, rows, *tables, torch.ones(1).int(), "DHN")
    nothing: Any = (None, None)
    for layout in ("NHD", "HND"):
        with pytest.raises(TypeError, match="paged_kv_cache: expected a tensor"):
            append_paged_kv_cache(
                rows, rows, *tables[:2], nothing, *tables[3:], torch.ones(1).int(), kv_layout=layout
            )
    with pytest.raises(ValueError, match="paged_kv_cache: expected page to be at least 1, got 0"):
        append_paged_kv_cache(rows, rows, *tables[:2], cache[:, :, :0], *tables[3:], torch.ones(1).int())


def test_tokens_outside_of_the_tables_are_written_nowhere() -> None:
    """Of a request that the tables do not have, and past their last page."""
    rows, cache = torch.ones(3, HEADS, SIZE), torch.zeros(3, 2, PAGE, HEADS, SIZE)
    at = torch.tensor([1, 0, 0]).int(), torch.tensor([0, 3 * PAGE, 1]).int()
    tables = torch.arange(3).int(), torch.tensor([0, 3]).int(), torch.ones(1).int()
    append_paged_kv_cache(rows, rows, *at, cache, *tables)
    assert cache.sum() == cache[0, :, 1].sum() == 2 * HEADS * SIZE


def test_a_later_plan_leaves_the_tables_of_an_earlier_one_alone() -> None:
    buffers: dict[str, Any] = {"qo_indptr_buf": torch.zeros(3).int(), "kv_indptr_buf": torch.zeros(3).int()}
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
    first, other = torch.tensor([0, 2, 4]).int(), torch.tensor([0, 2, 4]).int()
    keys, other_keys = torch.tensor([0, 3, 6]).int(), torch.tensor([0, 1, 6]).int()
    sizes: dict[str, Any] = {"num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim_qk": SIZE}
    wrapper.plan(first, keys, **sizes)
    wrapper.plan(other, other_keys, **sizes)
    assert keys.tolist() == [0, 3, 6]
    listed: Any = first.tolist()
    with pytest.raises(TypeError, match="qo_indptr_cpu: expected a tensor, got list"):
        wrapper.plan(first, keys, **sizes, qo_indptr_cpu=listed)
    with pytest.raises(TypeError, match="kv_indptr: expected dtype"):
        wrapper.plan(first, keys.float(), **sizes, kv_indptr_cpu=keys)


def test_slots_are_those_of_a_walk_through_the_tables() -> None:
    """Also where there is no page, or no request."""
    chance = random.Random(0)
    for _ in range(80):
        page, counts = chance.choice((1, 2, 4)), [chance.randint(0, 2) for _ in range(chance.randint(0, 3))]
        starts = [0, *accumulate(counts)]
        pages = chance.sample(range(20), starts[-1])
        tokens = [
            (chance.randint(-1, len(counts)), chance.randint(-1, 3 * page))
            for _ in range(chance.randint(0, 5))
        ]
        tables = ([b for b, _ in tokens], [at for _, at in tokens], pages, starts)
        given = (torch.tensor(table, dtype=torch.int32) for table in tables)
        found = _find_slots(GivenTensors("append_paged_kv_cache"), page, *given)
        expected = []
        for b, at in tokens:
            is_known = 0 <= b < len(counts) and at >= 0 and starts[b] + at // page < len(pages)
            expected.append(pages[starts[b] + at // page] * page + at % page if is_known else -1)
        assert found.tolist() == expected
