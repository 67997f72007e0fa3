"""Rows that are written behind a cache, and caches whose rows belong to others: beside loops."""

from __future__ import annotations

import random

import pytest
import torch

from attnc.compat import flash_attn
from attnc.compat.kvcache import _check_room, _choose_caches, append


@pytest.mark.parametrize("layout", ["rows", "others", "pages"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_new_rows_are_written_behind_each_sequence_and_nowhere_else(layout: str, is_packed: bool) -> None:
    """Down to none, up to the last row of a cache; behind the last packed sequence may be padding."""
    for seed in range(12):
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        B, page, pages = chance.randint(1, 4), chance.choice((2, 4, 16)), chance.randint(1, 5)
        capacity = page * pages
        added = [chance.randint(0, capacity) for _ in range(B)]
        if seed == 0 and is_packed:
            added = [0] * B
        if not is_packed:
            added = [added[0]] * B
        lengths = [chance.choice((0, capacity - new, chance.randint(0, capacity - new))) for new in added]
        new = torch.randn(sum(added), 2, 3, generator=generator)
        table = batch = None
        shape: tuple[int, ...] = (B, capacity)
        if layout == "pages":
            table = torch.randperm(B * pages + 2, generator=generator)[: B * pages].view(B, pages).int()
            shape = (B * pages + 2, page)
        elif layout == "others":
            batch = torch.randperm(B + 2, generator=generator)[:B].int()
            shape = (B + 2, capacity)
        cache = torch.randn(*shape, 2, 3, generator=generator)
        expected, at = cache.clone(), 0
        for b in range(B):
            for row in range(added[b]):
                place = lengths[b] + row
                if table is not None:
                    expected[table[b, place // page], place % page] = new[at]
                else:
                    expected[b if batch is None else batch[b], place] = new[at]
                at += 1
        starts = None
        if is_packed:
            starts = torch.tensor([0, *torch.tensor(added).cumsum(0)], dtype=torch.int32)
            new = torch.cat([new, torch.full((chance.randint(0, 3) or int(not len(new)), 2, 3), 9.0)])
        else:
            new = new.view(B, added[0], 2, 3)
        found = torch.tensor(lengths, dtype=torch.int32)
        append(cache, new, found, table=table, batch=batch, starts=starts)
        assert torch.equal(cache, expected), (seed, added, lengths)


@pytest.mark.parametrize("capacity", [16, 32, 48, 256, 512, 768])
def test_rows_that_belong_to_others_are_pages_without_a_copy(capacity: int) -> None:
    k, v = torch.randn(3, capacity, 2, 4), torch.randn(3, capacity, 2, 8)
    batch = torch.tensor([2, 0])
    for x, y in ((k, v), (k.expand(3, -1, -1, -1), v)):
        pages_k, pages_v, table = _choose_caches(x, y, batch)
        assert table is not None
        assert (pages_k.data_ptr(), pages_v.data_ptr()) == (x.data_ptr(), y.data_ptr())
        assert pages_k.shape[1] == max(size for size in (256, 128, 64, 32, 16) if capacity % size == 0)
        assert table.dtype == torch.int32
        for pages, whole in ((pages_k, x), (pages_v, y)):
            assert torch.equal(pages[table.long()].flatten(1, 2), whole[batch])


def test_rows_that_belong_to_others_are_copied_where_there_are_no_pages() -> None:
    k, v = torch.randn(3, 20, 2, 4), torch.randn(3, 40, 2, 4)[:, :20]
    part = torch.randn(3, 64, 2, 4)[:, :32]
    batch = torch.tensor([2, 0])
    for x, y in ((k, v), (part, part.contiguous()), (part.contiguous(), part)):
        found = _choose_caches(x, y, batch)
        assert found[2] is None
        assert all(map(torch.equal, found[:2], (x[batch], y[batch])))


def test_there_must_be_room_for_what_is_known() -> None:
    """Of lengths on the host: the shortest and the longest. How many packed rows are whose is not known."""
    cache, pages = torch.zeros(2, 9, 2, 4), torch.zeros(4, 3, 2, 4)
    table = torch.zeros(2, 3, dtype=torch.int32)
    new, packed = torch.zeros(2, 4, 2, 4), torch.zeros(5, 2, 4)
    for kept, given in ((cache, None), (pages, table)):
        for x, count in ((None, 0), (new, 4), (packed, 0)):
            behind = f", as {count} more go behind them in 9" if count else ""
            for length in (-1, 0, 9 - count, 10 - count):
                lengths = torch.tensor([3, length], dtype=torch.int32)
                for each in (length, lengths, lengths.flip(0)):
                    if 0 <= length <= 9 - count:
                        _check_room("f", kept, x, each, given)
                        continue
                    wanted = f"f: cache_seqlens: expected 0 to {9 - count} rows{behind}, got {length}$"
                    with pytest.raises(ValueError, match=wanted):
                        _check_room("f", kept, x, each, given)
        _check_room("f", kept, new, None, given)
    for empty in (cache[:0], cache[:, :0]):
        with pytest.raises(ValueError, match="f: k_cache: expected rows to write to"):
            _check_room("f", empty, new, None, None)
        _check_room("f", empty, None, None, None)


def test_angles_have_a_position() -> None:
    q, new = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 2, 16)
    angles = torch.ones(0, 8)
    caches = torch.zeros(2, 2, 9, 2, 16)
    one = torch.ones(1, 8)
    flash_attn.flash_attn_with_kvcache(q, caches[0], caches[1], new, new, one, one, cache_seqlens=0)
    with pytest.raises(ValueError, match="rotary_cos: expected positions to be"):
        flash_attn.flash_attn_with_kvcache(q, caches[0], caches[1], new, new, angles, angles, cache_seqlens=3)


@pytest.mark.parametrize(("capacity", "known"), [(32, True), (20, False)])
def test_caches_of_chosen_rows_end_where_they_are_said_to(capacity: int, known: bool) -> None:
    """As pages or copied; all of them where no lengths are given."""
    q = torch.randn(2, 1, 2, 16, dtype=torch.float16)
    k, v = torch.randn(2, 3, capacity, 2, 16, dtype=torch.float16)
    batch, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([7, capacity - 1])
    said = lengths.int() if known else None
    o = flash_attn.flash_attn_with_kvcache(q, k, v, cache_batch_idx=batch, cache_seqlens=said)
    for row, own, length in zip(range(2), batch, lengths if known else [capacity] * 2, strict=True):
        keys, values = (x[own, :length].double() for x in (k, v))
        p = torch.einsum("hd,nhd->hn", q[row, 0].double(), keys).div(4).softmax(-1)
        torch.testing.assert_close(
            o[row, 0].double(), torch.einsum("hn,nhd->hd", p, values), atol=2e-3, rtol=2e-3
        )
