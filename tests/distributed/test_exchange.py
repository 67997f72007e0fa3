"""Chunks exchanged between ranks: as many as before, in less time, and with even work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.distributed.exchange import Exchange
from attnc.distributed.offers import EVEN, contiguous
from attnc.distributed.spans import Bools, Ints


def time_of(work: Any, seen: Bools, owner: Ints, ranks: int, waiting: float) -> float:
    """What `Exchange` makes small, with sets of chunks."""
    mean, total = max(work.sum() / ranks, 1.0), 0.0
    for rank in range(ranks):
        mine = set(np.flatnonzero(owner == rank).tolist())
        coming = {key for chunk in mine for key in np.flatnonzero(seen[chunk]).tolist()} - mine
        load = sum(work[chunk] for chunk in mine) / mean
        total += (load + 10.0 * max(load - 1.0 - EVEN, 0.0) + waiting / mean * len(coming)) ** 4
    return float(total)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Any, Bools, int, float]:
    count, ranks = draw(st.integers(1, 70)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    first = np.maximum(np.arange(count) - random.integers(0, 6, count), 0)
    seen = (np.arange(count) >= first[:, None]) & (np.arange(count) <= np.arange(count)[:, None])
    return (
        random.integers(0, 1000, count).astype(np.float64),
        seen,
        ranks,
        draw(st.sampled_from((0.0, 50.0, 900.0))),
    )


@given(drawn())
def test_exchanges_keep_the_number_of_chunks_and_shorten_the_whole(
    case: tuple[Any, Bools, int, float],
) -> None:
    work, seen, ranks, waiting = case
    start = contiguous(len(work), ranks)
    exchange = Exchange(work, seen, start, ranks, waiting=waiting, even=EVEN)
    assert exchange._total() == pytest.approx(time_of(work, seen, start, ranks, waiting))
    owner = exchange.improve()
    assert exchange._looks >= 0, "no more looks than the host has time for"
    assert np.bincount(owner, minlength=ranks).tolist() == np.bincount(start, minlength=ranks).tolist()
    before, after = (time_of(work, seen, x, ranks, waiting) for x in (start, owner))
    assert after <= before * (1 + 1e-12)


@given(drawn())
def test_what_two_ranks_exchange_is_the_best_of_all_pairs(case: tuple[Any, Bools, int, float]) -> None:
    work, seen, _, waiting = case
    owner = np.arange(len(work), dtype=np.int64) % 2
    exchange = Exchange(work, seen, owner, 2, waiting=waiting, even=EVEN)
    found = exchange._best_of(*exchange._state)
    times = {}
    for a in np.flatnonzero(owner == 0).tolist():
        for b in np.flatnonzero(owner == 1).tolist():
            other = owner.copy()
            other[a], other[b] = 1, 0
            times[a, b] = time_of(work, seen, other, 2, waiting)
    now = time_of(work, seen, owner, 2, waiting)
    if found is None:
        assert all(time > now - 2e-4 for time in times.values())
    else:
        assert times[found] == pytest.approx(min(times.values()))


def test_documents_are_kept_together_with_even_work() -> None:
    """16 documents of 3 to 6 chunks on 4 ranks: runs of rows are uneven, and even work alone moves keys of
    twice as many chunks.
    """
    random = np.random.default_rng(5)
    document = np.repeat(np.arange(16), random.integers(3, 7, 16))[:64]
    place = np.arange(64) - np.searchsorted(document, document)
    seen = (document[:, None] == document) & (np.arange(64) <= np.arange(64)[:, None])
    work, start = (2 * place + 1).astype(np.float64), contiguous(64, 4)
    owner = Exchange(work, seen, start, 4, waiting=0.5, even=EVEN).improve()
    load = np.bincount(owner, weights=work)
    assert load.max() / load.mean() < 1.02 < np.bincount(start, weights=work).max() / load.mean()

    def coming(owner: Ints) -> int:
        return sum(int((seen[owner == rank].any(axis=0) & (owner != rank)).sum()) for rank in range(4))

    even = Exchange(work, seen, start, 4, waiting=0.0, even=EVEN).improve()
    assert (coming(owner), coming(even)) == (7, 13)
