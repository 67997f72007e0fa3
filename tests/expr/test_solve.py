"""The loop bounds of masks that people use, as kernels print them; and what they decide, by brute force."""

from dataclasses import replace

import pytest

from attnc.expr.affine import larger, smaller
from attnc.expr.construct import ZERO
from attnc.expr.evaluate import evaluate
from attnc.expr.interval import classify
from attnc.expr.nodes import Dim, Expr, show
from attnc.expr.solve import Ranges, Var, solve
from tests.by_day import some_by_day
from tests.expr.masks import case
from tests.expr.soundness import check_classify, check_solve
from tests.expr.spell import spell

CAUSAL = "kv_idx <= q_pos"
WINDOW = "q_pos - 128 <= kv_idx <= q_pos"
SAME_DOC = "doc[b, q_pos] == doc[b, kv_idx]"
IN_PREFIX = "q_pos < prefix[b] and kv_idx < prefix[b]"

# The documents of the queries of a tile. Rows with q_pos < 0 (when M > N) read 0.
FIRST_DOC = "min(doc[b, q_lo + N - M], doc[b, max(q_lo + N - M, 0)])"
LAST_DOC = "max(doc[b, q_lo + N - M], doc[b, q_hi + N - M])"
ONE_DOC = f"{LAST_DOC} == {FIRST_DOC}"
MAY_PREFIX = "where(q_lo + N - M < prefix[b], prefix[b], 0)"
MUST_PREFIX = "where(q_hi + N - M < prefix[b], prefix[b], 0)"


#: Numbers at the ends of 64 bits on both sides: terms cannot change sides.
FAR_SUM = "limit[b] // 2 + stamp[b, 1] // 2 <= stamp[b, 0]"


def text(expr: Expr | None) -> str:
    return "..." if expr is None else show(expr)


def ends(ranges: Ranges) -> tuple[str, str, str, str]:
    return text(ranges.may_lo), text(ranges.may_hi), text(ranges.must_lo), text(ranges.must_hi)


KV = {
    CAUSAL: ("...", "q_hi + N - M + 1", "...", "q_lo + N - M + 1"),
    "kv_idx <= q_idx": ("...", "q_hi + 1", "...", "q_lo + 1"),
    WINDOW: ("q_lo + N - M - 128", "q_hi + N - M + 1", "q_hi + N - M - 128", "q_lo + N - M + 1"),
    "abs(q_pos - kv_idx) <= 5": (
        "q_lo + N - M - 5", "q_hi + N - M + 6", "q_hi + N - M - 5", "q_lo + N - M + 6",
    ),
    f"{CAUSAL} or kv_idx < prefix[b]": (
        "...", "max(q_hi + N - M + 1, prefix[b])", "...", "max(q_lo + N - M + 1, prefix[b])",
    ),
    "q_pos // 16 == kv_idx // 16": (
        "(q_lo + N - M) // 16 * 16", "(q_hi + N - M) // 16 * 16 + 16",
        "(q_hi + N - M) // 16 * 16", "(q_lo + N - M) // 16 * 16 + 16",
    ),
    "kv_idx < kv_len[b]": ("...", "kv_len[b]", "...", "kv_len[b]"),
    f"{CAUSAL} and kv_idx < kv_len[b]": (
        "...", "min(q_hi + N - M + 1, kv_len[b])", "...", "min(q_lo + N - M + 1, kv_len[b])",
    ),
    "q_pos - width[h] <= kv_idx": ("q_lo + N - M - width[h]", "...", "q_hi + N - M - width[h]", "..."),
    f"{CAUSAL} or h < 2": (
        "...", "where(h < 2, N, q_hi + N - M + 1)", "...", "where(h < 2, N, q_lo + N - M + 1)",
    ),
    SAME_DOC: (
        f"first(doc[b, :] >= {FIRST_DOC})", f"first(doc[b, :] > {LAST_DOC})",
        f"first(doc[b, :] >= {FIRST_DOC})", f"where({ONE_DOC}, first(doc[b, :] > {LAST_DOC}), 0)",
    ),
    f"{SAME_DOC} and ({CAUSAL} or {IN_PREFIX})": (
        f"first(doc[b, :] >= {FIRST_DOC})",
        f"min(first(doc[b, :] > {LAST_DOC}), max(q_hi + N - M + 1, {MAY_PREFIX}))",
        f"first(doc[b, :] >= {FIRST_DOC})",
        f"where({ONE_DOC}, min(first(doc[b, :] > {LAST_DOC}), max(q_lo + N - M + 1, {MUST_PREFIX})), 0)",
    ),
}  # fmt: skip

Q = {
    CAUSAL: ("kv_lo + M - N", "...", "kv_hi + M - N", "..."),
    WINDOW: ("kv_lo + M - N", "kv_hi + M - N + 129", "kv_hi + M - N", "kv_lo + M - N + 129"),
    f"{CAUSAL} or kv_idx < prefix[b]": (
        "where(kv_lo < prefix[b], 0, kv_lo + M - N)", "...",
        "where(kv_hi < prefix[b], 0, kv_hi + M - N)", "...",
    ),
    "kv_idx < kv_len[b]": (
        "...", "where(kv_lo < kv_len[b], M, 0)", "...", "where(kv_hi < kv_len[b], M, 0)",
    ),
    SAME_DOC: (
        "where(N < M and 0 >= doc[b, kv_lo], 0, first(doc[b, :] >= doc[b, kv_lo]) + M - N)",
        "first(doc[b, :] > doc[b, kv_hi]) + M - N",
        "first(doc[b, :] >= doc[b, kv_lo]) + M - N",
        "where(doc[b, kv_hi] == doc[b, kv_lo], first(doc[b, :] > doc[b, kv_hi]) + M - N, 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mask", KV)
def test_bounds_of_the_forward_loop(mask: str) -> None:
    ranges = solve(spell(mask))
    assert ends(ranges) == KV[mask]
    assert ranges.tile_may is None


@pytest.mark.parametrize("mask", Q)
def test_bounds_of_the_backward_loop(mask: str) -> None:
    ranges = solve(spell(mask), "q_idx")
    assert ends(ranges) == Q[mask]
    assert ranges.tile_may is None


def test_a_gap_in_a_disjunction_needs_a_test_per_tile() -> None:
    ranges = solve(spell(f"(kv_idx < 4 or q_pos - 128 <= kv_idx) and {CAUSAL}"))
    assert ends(ranges) == ("...", "q_hi + N - M + 1", "q_hi + N - M - 128", "q_lo + N - M + 1")
    assert text(ranges.tile_may) == "kv_lo < 4 or kv_hi >= q_lo + N - M - 128"


def test_a_remainder_is_tested_per_tile_only_if_tiles_are_smaller() -> None:
    mask = spell("kv_idx % 100 == 3")
    assert text(solve(mask, tile=64).tile_may) == "kv_lo <= (kv_hi - 3) // 100 * 100 + 3"
    assert solve(mask, tile=128).tile_may is None


@pytest.mark.parametrize(
    ("mask", "var", "flags"),
    [
        ("true", "kv_idx", "full"),
        (CAUSAL, "kv_idx", "full_right"),
        (CAUSAL, "q_idx", "left_full"),
        (WINDOW, "kv_idx", "left_full_right"),
        ("kv_idx % 4 == 0", "kv_idx", "left"),
        ("kv_idx < 0", "kv_idx", "never"),
        ("kv_idx >= N or q_idx < 0", "q_idx", "never"),
        ("kv_idx < N and kv_idx >= 0 and q_pos < N", "kv_idx", "full"),
        ("keep[b, kv_idx]", "kv_idx", "left"),
    ],
)
def test_which_loops_can_run(mask: str, var: Var, flags: str) -> None:
    ranges = solve(spell(mask), var)
    ends = (ranges.may_hi, ranges.must_hi) != (None, None)
    loops = {"left": ranges.left_partial, "full": ranges.any_full, "right": ranges.any_full and ends}
    assert ("_".join(name for name, runs in loops.items() if runs) or "never") == flags
    assert ranges.never == (flags == "never")
    assert ranges.full == (flags == "full")


def test_a_window_smaller_than_a_tile_has_no_full_tiles() -> None:
    assert solve(spell(WINDOW), tile=128).any_full
    assert not solve(spell(WINDOW), tile=130).any_full


@pytest.mark.parametrize(
    ("mask", "may", "must"),
    [
        (CAUSAL, "kv_lo <= q_hi + N - M", "kv_hi <= q_lo + N - M"),
        (
            WINDOW,
            "kv_hi >= q_lo + N - M - 128 and kv_lo <= q_hi + N - M",
            "kv_lo >= q_hi + N - M - 128 and kv_hi <= q_lo + N - M",
        ),
        ("kv_idx < kv_len[b]", "kv_lo < kv_len[b]", "kv_hi < kv_len[b]"),
        ("slope[h] < 0.5", "slope[h] < 0.5", "slope[h] < 0.5"),
        ("tag[b, kv_idx] == 1", "true", "false"),
        ("doc[b, kv_idx] < 3", "doc[b, kv_lo] < 3", "doc[b, kv_hi] < 3"),
        (FAR_SUM, FAR_SUM, FAR_SUM),
        (FAR_SUM.replace("stamp[b, 1]", "stamp[b, kv_idx]"), "true", "false"),
    ],
)
def test_classify(mask: str, may: str, must: str) -> None:
    assert tuple(map(show, classify(spell(mask)))) == (may, must)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("shape", "mask"),
    some_by_day(
        [(7, 7), (5, 23), (19, 6), (1, 40), (1, 1)],
        [*KV, "q_pos < 3 or kv_idx < 4", "kv_idx % 3 == 1", "kv_idx != q_pos"],
        of=4,
    ),
)
def test_usual_masks_are_decided_wherever_they_can_be(mask: str, shape: tuple[int, int]) -> None:
    tree = spell(mask.replace("128", "6").replace("16", "4"))
    for tile in ((1, 1), (4, 4), (3, 5)):
        for seed in range(3):
            drawn = case(seed, *shape, *tile)
            counts = check_classify(tree, drawn)
            # Queries before the first key read document 0, wherever that would be in the order.
            assert counts["decided"] == counts["decidable"] or ("doc" in mask and shape[0] > shape[1])
            check_solve(tree, drawn, "kv_idx")
            check_solve(tree, drawn, "q_idx")


@pytest.mark.parametrize("mask", [*KV, "kv_idx < 1", "kv_idx >= 0 or h < 9", "abs(kv_idx - 3) <= 5"])
def test_an_empty_key_sequence_has_no_tiles(mask: str) -> None:
    ranges = solve(spell(mask))
    drawn = case(0, 5, 0, 2, 2)
    for lo, hi in ((ranges.may_lo, ranges.may_hi), (ranges.must_lo, ranges.must_hi)):
        first, last = larger(lo or ZERO, ZERO), smaller(hi or Dim("N"), Dim("N"))
        env = replace(drawn.tiles, indices={**drawn.tiles.indices, "kv_lo": 0, "kv_hi": -1})
        assert (evaluate(first, env) >= evaluate(last, env)).all()
