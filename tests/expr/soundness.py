"""Holds `classify` and `solve` against brute force, tile by tile, and counts how much they decide."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from attnc.expr.evaluate import evaluate
from attnc.expr.interval import classify
from attnc.expr.nodes import TRUE, Expr
from attnc.expr.solve import Ranges, Var, solve
from tests.expr.masks import Case

Bools = npt.NDArray[np.bool_]


def truth(kept: Bools, case: Case) -> tuple[Bools, Bools]:
    """(any, all) of every tile."""
    rows, columns = np.arange(0, case.m, case.tile_q), np.arange(0, case.n, case.tile_kv)
    some = np.logical_or.reduceat(np.logical_or.reduceat(kept, rows, 0), columns, 1)
    every = np.logical_and.reduceat(np.logical_and.reduceat(kept, rows, 0), columns, 1)
    return some, every


def check_classify(mask: Expr, case: Case) -> Counter[str]:
    """Asserts that no tile is unsound; counts decidable tiles and decided ones."""
    some, every = truth(case.kept(mask), case)
    may, must = (case.over_tiles(expr) for expr in classify(mask))
    assert not (some & ~may).any(), "a tile with kept elements is skipped"
    assert not (must & ~every).any(), "a tile with dropped elements is full"
    return Counter(decidable=int((~some | every).sum()), decided=int((~may | must).sum()))


def check_solve(mask: Expr, case: Case, var: Var) -> Counter[str]:
    """The same for the ranges of one index, as a kernel would use them."""
    kept = case.kept(mask)
    tile = case.tile_kv if var == "kv_idx" else case.tile_q
    ranges = solve(mask, var, tile=tile)
    some, every = truth(kept, case)
    skip_test = ~case.over_tiles(ranges.tile_may or TRUE)
    assert not (some & skip_test).any(), "tile_may skips kept elements"
    if var == "q_idx":
        kept, some, every, skip_test = kept.T, some.T, every.T, skip_test.T
    length, other_tile = kept.shape[1], case.tile_q if var == "kv_idx" else case.tile_kv
    assert not (ranges.never and kept.any())
    assert not (ranges.full and not kept.all())

    counts: Counter[str] = Counter()
    for row, ends in enumerate(zip(*clamped(ranges, var, case, len(some), length), strict=True)):
        lo, hi, must_lo, must_hi = map(int, ends)
        rows = kept[row * other_tile : (row + 1) * other_tile]
        position = np.arange(length)
        outside, inside = (position < lo) | (position >= hi), (position >= must_lo) & (position < must_hi)
        assert not rows[:, outside].any(), "kept positions lie outside may"
        assert rows[:, inside].all(), "dropped positions lie inside must"
        first, last = lo // tile, -(-hi // tile) if lo < hi else lo // tile
        full_first, full_last = (
            -(-must_lo // tile),
            must_hi // tile + (must_hi == length and length % tile > 0),
        )
        if first < last:
            assert ranges.left_partial or full_first <= first or not ranges.any_full
            assert ranges.left_partial or ranges.any_full
            ends = ranges.may_hi, ranges.must_hi
            assert ends != (None, None) or not ranges.any_full or full_last >= last
        for column in range(some.shape[1]):
            skipped = not first <= column < last or skip_test[row, column]
            full = ranges.any_full and full_first <= column < full_last
            counts["decidable"] += int(not some[row, column] or every[row, column])
            counts["decided"] += int(skipped or full)
    return counts


def clamped(
    ranges: Ranges, var: Var, case: Case, rows: int, length: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """may_lo, may_hi, must_lo, must_hi of `var` within 0..length, for each tile of the other index."""
    env = case.tiles
    used = ("q_lo", "q_hi") if var == "kv_idx" else ("kv_lo", "kv_hi")
    env = replace(env, indices={name: v for name, v in env.indices.items() if name in ("b", "h", *used)})

    def end(expr: Expr | None, default: int) -> npt.NDArray[np.int64]:
        values = np.asarray(default) if expr is None else evaluate(expr, env)
        return np.broadcast_to(np.clip(values.reshape(-1), 0, length), rows)

    may = end(ranges.may_lo, 0), end(ranges.may_hi, length)
    return *may, end(ranges.must_lo, 0), end(ranges.must_hi, length)
