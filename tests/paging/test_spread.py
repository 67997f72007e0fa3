"""Where keys lie that ranks share, against an assignment of one key after the other."""

from __future__ import annotations

import pytest
import torch

from attnc.paging import PagedCache, Spread


def dealt(ranks: int, block: int, length: int) -> list[list[int]]:
    """The positions that each rank has, in the order in which they are dealt out."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    for position in range(length):
        found[position // block % ranks].append(position)
    return found


@pytest.mark.parametrize(("ranks", "block"), [(1, 1), (2, 1), (3, 4), (4, 2), (2, 16), (2, 3)])
def test_keys_go_round_the_ranks_by_blocks(ranks: int, block: int) -> None:
    spread = Spread(ranks, block)
    lengths = list(range(3 * ranks * block + 2))
    for rank in range(ranks):
        counts = [len(dealt(ranks, block, length)[rank]) for length in lengths]
        assert [spread.count(length, rank) for length in lengths] == counts
        found = spread.counts(torch.tensor(lengths), rank)
        assert (found.tolist(), found.dtype) == (counts, torch.int64)
        for rows in range(1, 2 * block + 1):
            longest = max(n for n in range(4 * ranks * block) if len(dealt(ranks, block, n)[rank]) <= rows)
            assert spread.longest(rows, rank) == longest
        mine = dealt(ranks, block, lengths[-1])[rank]
        positions = spread.positions(len(mine), rank, torch.device("cpu"))
        assert (positions.tolist(), positions.dtype) == (mine, torch.int32)
        for row, position in enumerate(mine):
            assert (spread.rank(position), spread.row(position)) == (rank, row)
        assert spread.row(torch.tensor(mine)).tolist() == list(range(len(mine)))


@pytest.mark.parametrize("lengths", [(5, 23), (8, 0), (1, 16)])
def test_each_rank_reads_and_counts_the_keys_that_it_has(lengths: tuple[int, int]) -> None:
    spread = Spread(3, 2)
    for rank in range(3):
        cache = PagedCache(
            pages=8, page=4, kv_heads=1, head_dim=1, sequences=2, max_length=40, spread=spread, rank=rank,
            dtype=torch.float32,
        )  # fmt: skip
        sequences = [cache.allocate(), cache.allocate()]
        step = cache.append(sequences, lengths)
        positions = torch.cat([torch.arange(length) for length in lengths]).float()[:, None, None]
        assert step.own is not None
        own = positions[step.own]
        cache.write(step.slots, own, own + 100)
        found = [cache.read(sequence) for sequence in sequences]
        for length, (k, v) in zip(lengths, found, strict=True):
            has = [float(at) for at in range(length) if spread.rank(at) == rank]
            assert (k.flatten().tolist(), (v - 100).flatten().tolist()) == (has, has)
        assert cache.counts().tolist() == [len(k) for k, _ in found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_last_token_is_written_by_the_rank_that_has_it(ranks: int) -> None:
    """The others write to the page to spare."""
    spread = Spread(ranks, 2)
    lengths = [0, *range(1, 4 * ranks + 2)]
    for rank in range(ranks):
        cache = PagedCache(
            pages=24, page=4, kv_heads=1, head_dim=1, sequences=len(lengths), max_length=40, spread=spread,
            rank=rank, dtype=torch.float32,
        )  # fmt: skip
        cache.append([cache.allocate() for _ in lengths], lengths)
        for length, slot in zip(lengths, cache.last_slots().tolist(), strict=True):
            is_own = length > 0 and spread.rank(length - 1) == rank
            assert (slot // cache.page == cache.pages) == (not is_own), (length, rank)
            if is_own:
                assert slot % cache.page == spread.row(length - 1) % cache.page
