"""No tile is ever skipped or called full in error: random masks, and masks that lie where mistakes would."""

from itertools import product

import pytest
from hypothesis import given, settings

from attnc.expr.nodes import Expr
from tests.expr.masks import Case, case, cases, masks
from tests.expr.soundness import check_classify, check_solve
from tests.expr.spell import spell

CORNERS = (
    "doc[b, q_pos] <= doc[b, kv_idx]",
    "doc[b, q_pos] > doc[b, kv_idx - 2]",
    "doc[b, kv_idx + 3] >= prefix[b]",
    "doc[b, kv_idx + 3] <= 0",
    "doc[b, kv_idx - 3] >= 0",
    "doc[b, kv_idx] != doc[b, q_idx]",
    "doc[b, q_pos + 2] == 0",
    "time[b, q_pos] < time[b, kv_idx]",
    "time[b, kv_idx - 1] == time[b, q_pos]",
    "not time[b, kv_idx + 1] > 1",
    "where(q_pos < 2, kv_idx, q_pos) <= kv_idx - 2",
    "where(kv_idx < q_pos, 3, kv_idx) == where(flag[b], 3, q_idx)",
    "kv_idx % 3 > q_pos % 4",
    "(q_pos - kv_idx) % 3 == h",
    "kv_idx % N == q_idx % M",
    "abs(q_pos // 3 - kv_idx // 3) >= 1",
    "abs(2 * kv_idx - 3 * q_pos) < 7",
    "(kv_idx - q_pos) // 3 == -1",
    "(kv_idx - 2 * q_idx) // -2 <= h",
    "3 * kv_idx > q_pos + 1 and -2 * kv_idx >= q_pos - 9",
    "min(kv_idx, q_pos) < max(3, q_idx) - 2",
    "kv_idx < 2 or kv_idx > q_pos + 1 or kv_idx == 4",
    "kv_idx * width[h] <= q_pos * prefix[b]",
    "slope[h] * (q_pos - kv_idx) <= 1",
    "kv_idx < prefix[b] and flag[b] or kv_idx > q_pos - 2 and not flag[b]",
    "q_pos < prefix[b] and kv_idx < prefix[b] or kv_idx <= q_pos",
    "keep[b, kv_idx] == (kv_idx <= q_pos)",
    "kv_idx <= min(limit[b], stamp[b, 0])",
    "kv_idx > max(limit[b], prefix[b])",
    "kv_idx <= where(flag[b], limit[b], q_pos)",
    "kv_idx - q_pos <= min(limit[b], width[h]) or (q_pos - kv_idx) % 3 == 0",
    "kv_idx // 3 <= max(limit[b], width[h])",
    "min(kv_idx, limit[b]) < q_pos",
    "doc[b, kv_idx] > limit[b]",
    "stamp[b, kv_idx] > limit[b]",
    "stamp[b, kv_idx] < stamp[b, q_pos]",
    "not (slope[h] * (q_pos - kv_idx) < 2)",
    "abs(slope[h]) * kv_idx >= 2",
    "doc[b, kv_idx] >= slope[h]",
    "doc[b, kv_idx] != slope[h]",
    "doc[b, kv_idx] < slope[h] * q_pos",
    "min(bias[h, q_idx, kv_idx], 2) <= 3",
    "not (max(bias[h, q_idx, kv_idx], 2) > 1)",
    "slope[h] != 1 and kv_idx <= q_pos",
    "where(slope[h] < 1, kv_idx <= q_pos, kv_idx > 3)",
    "kv_idx // 4 <= limit[b] // 4",
    "kv_idx // 4 > limit[b] // 3",
    "kv_idx // 4 <= limit[b] // 3",
    "kv_idx // 4 <= limit[b]",
    "kv_idx // 4 >= limit[b] - 1",
    "kv_idx // 4 == limit[b] + stamp[b, 0] // 2",
    "kv_idx // 4 <= limit[b] // 8 + stamp[b, 0] // 8",
    "kv_idx + limit[b] // 2 <= stamp[b, 0]",
    "min(kv_idx + limit[b] // 2, 5) == stamp[b, 0]",
    "stamp[b, kv_idx] // 1000 <= limit[b]",
    "stamp[b, kv_idx] // 1000 > limit[b] // 7",
    "stamp[b, kv_idx] // 1000 == stamp[b, q_pos] // 1000",
    "stamp[b, kv_idx] // 1024 == stamp[b, q_pos] // 1024",
    "slope[h] * (kv_idx - q_pos) <= inf",
    "min(slope[h] * (kv_idx - 3), 5) < 6",
    "abs(slope[h] * (kv_idx % 3)) >= 0",
    "abs(bias[h, q_idx, kv_idx]) >= 0",
    "1.5 > slope[h] * kv_idx - abs(bias[h, q_idx, kv_idx])",
)


def check(mask: Expr, drawn: Case) -> None:
    check_classify(mask, drawn)
    check_solve(mask, drawn, "kv_idx")
    check_solve(mask, drawn, "q_idx")


@pytest.mark.slow
@settings(max_examples=min(settings().max_examples, 600) * 4 // 10)
@given(mask=masks(), drawn=cases())
def test_random_masks(mask: Expr, drawn: Case) -> None:
    check(mask, drawn)


SHAPES, TILES = ((6, 6), (3, 11), (11, 4), (1, 5)), ((2, 3), (4, 2))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("text", CORNERS)
def test_corners(text: str) -> None:
    for shape, tile, seed in product(SHAPES, TILES, range(2)):
        check(spell(text), case(seed, *shape, *tile))


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("share", range(6))
def test_each_corner_once(share: int) -> None:
    """By day, in one shape of each size or the other."""
    places = [*product(SHAPES, TILES, range(2))]
    for at, text in [*enumerate(CORNERS)][share::6]:
        shape, tile, seed = places[at * 7 % len(places)]
        check(spell(text), case(seed, *shape, *tile))
