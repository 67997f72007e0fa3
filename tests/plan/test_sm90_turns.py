"""Under which masks blocks of Hopper's backward can take turns at adding to dq."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from attnc.expr.construct import add, compare, floordiv, maximum, minimum, mul, sub, where
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Const, Dim, Expr, Index
from attnc.plan.sm90.backward import Sm90Backward, sum_of_dq
from attnc.plan.sm90.turns import _falls, _grows, lengths_of_walks
from tests.plan import planning
from tests.plan.test_sm90_backward import CAUSAL, is_by_wgmma, planned
from tests.refusals import refused

DOCUMENTS = {"inputs": ("doc: i32[B, N] is sorted",)}
LISTS = {"inputs": ("idx: i32[B, R, S]",)}
#: Masks; whether the last kv tile has the first turn, and whether the first to add varies.
NEIGHBOURS: tuple[tuple[str, tuple[bool, bool], dict[str, Any]], ...] = (
    ("true", (False, False), {}),
    (CAUSAL, (True, True), {}),
    ("q_pos <= kv_idx", (False, True), {}),
    ("kv_idx <= q_pos and kv_idx > q_pos - 100", (True, True), {}),
    (f"{CAUSAL} and doc[b, q_pos] == doc[b, kv_idx]", (True, True), DOCUMENTS),
    (f"{CAUSAL} and q_pos // 100 == kv_idx // 100", (True, True), {}),
    (f"{CAUSAL} or kv_idx < n[b]", (True, True), {"inputs": ("n: i32[B]",)}),
    ("kv_idx < n[b]", (False, False), {"inputs": ("n: i32[B]",)}),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mask", "order", "options"), NEIGHBOURS)
def test_keys_that_see_a_query_are_neighbours(
    mask: str, order: tuple[bool, bool], options: dict[str, Any]
) -> None:
    module = planned(mask, accumulate="ordered", **options)
    assert is_by_wgmma(module)
    assert list(module.backward_kernels) == ["dkdv"]
    assert module.backward is not None
    layout = module.backward.layout
    assert isinstance(layout, Sm90Backward)
    assert layout.turns is not None
    assert (layout.turns.from_last, layout.turns.first_varies) == order


@pytest.mark.parametrize(
    ("mask", "options", "said"),
    [
        ("kv_idx < 4 or (kv_idx <= q_pos and kv_idx > q_pos - 100)", {}, "it skips tiles between others"),
        (f"{CAUSAL} and (q_pos - kv_idx) % 200 < 8", {}, "it skips tiles between others"),
        ("q_idx + kv_idx >= 500", {}, "are no neighbours"),
        (f"{CAUSAL} and kv_idx >= 150", {}, "are no neighbours"),
        (f"{CAUSAL} and kv_idx >= n[b]", {"inputs": ("n: i32[B]",)}, "are no neighbours"),
        ("kv_idx >= 150", {}, "are no neighbours"),
        ("listed(idx, rows = 128, keys = 128)", LISTS, "it lists blocks of keys, and skips those between"),
        (CAUSAL, {"d": 192}, "no kernel of wgmma makes dk, dv and dq"),
        (
            CAUSAL,
            {"grads": "q, k, v, x", "score": "dot(q, k) + x[h]", "inputs": ("x: f32[H]",)},
            "no kernel of wgmma makes dk, dv and dq",
        ),
    ],
)
def test_what_cannot_be_ordered_is_refused_with_the_reason(
    mask: str, options: dict[str, Any], said: str
) -> None:
    found = refused(planned, mask, accumulate="ordered", **options)
    assert found.code == "E0602"
    assert said in found.primary.text
    assert "two_pass" in found.hints[0]


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
def test_other_targets_have_no_turns(target: str) -> None:
    schedule = "  backward { accumulate.dq = ordered }"
    found = refused(planning.planned, CAUSAL, schedule=schedule, target=target, grads="q, k, v")
    assert (found.code, found.message) == ("E0602", f"blocks of {target} take no turns")


def tiles_of(mask: str, m: int, n: int, tile_q: int, tile_kv: int) -> Iterator[list[int]]:
    """By q tile the kv tiles with a key that some query of it sees; the mask in Python's words."""
    for q_lo in range(0, m, tile_q):
        yield [
            kv_lo // tile_kv
            for kv_lo in range(0, n, tile_kv)
            if any(
                eval(mask, {"q_pos": q + n - m, "kv_idx": kv})  # a mask of this file
                for q in range(q_lo, min(q_lo + tile_q, m))
                for kv in range(kv_lo, min(kv_lo + tile_kv, n))
            )
        ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mask", [mask for mask, _, options in NEIGHBOURS if not options and mask != "true"])
@pytest.mark.parametrize(("m", "n"), [(60, 60), (90, 40), (40, 90)])
def test_neighbours_are_neighbours(mask: str, m: int, n: int) -> None:
    """What the plan concludes from its bounds, tile by tile."""
    mask = mask.replace("100", "20")
    for found in tiles_of(mask, m, n, 4, 8):
        assert found == list(range(found[0], found[0] + len(found))) if found else True


_ENDS = (Index("kv_lo"), Index("kv_hi"))
_LEAVES = (*_ENDS, Dim("M"), Dim("N"), Const(3), Const(40))


def draw_bound(draw: random.Random, depth: int) -> Expr:
    """A bound of a loop over queries, of the kinds that masks are solved for."""
    if not depth:
        return draw.choice(_LEAVES)
    x, y = (draw_bound(draw, depth - 1) for _ in range(2))
    number = Const(draw.choice((2, 5)))
    condition = compare("<", x, y)
    made: tuple[Expr, ...] = (add(x, y), sub(x, y), sub(y, x), minimum(x, y), maximum(x, y), mul(x, number))
    return draw.choice((*made, floordiv(x, number), where(condition, draw_bound(draw, depth - 1), Const(0))))


def test_what_is_said_to_grow_or_fall_does_so_from_tile_to_tile() -> None:
    tile, draw, claimed = 8 * np.arange(12), random.Random(0), [0, 0]
    ends = {"kv_lo": tile, "kv_hi": np.minimum(tile + 8, 90) - 1}
    for number in range(600):
        bound = draw_bound(draw, 1 + number % 3)
        value = np.broadcast_to(evaluate(bound, Env(indices=ends, dims={"M": 50, "N": 90})), tile.shape)
        # a bound is clamped to queries that there are; where it is one, sizes and positions are not below 0
        steps = np.diff(value.astype(np.int64))
        if (value < 0).any():
            continue
        for which, (claims, holds) in enumerate(((_grows, steps >= 0), (_falls, steps <= 0))):
            if claims(bound):
                claimed[which] += 1
                assert holds.all(), bound
    assert min(claimed) > 100


@pytest.mark.parametrize("end", _ENDS)
def test_sums_with_the_ends_of_a_tile_are_known_to_grow_or_fall(end: Index) -> None:
    for rest in (Dim("M"), sub(Dim("M"), Dim("N")), Const(7)):
        falls = sub(rest, end)
        assert _grows(add(rest, end))
        assert _grows(sub(end, rest))
        assert _falls(falls)
        assert _grows(sub(rest, falls))
        assert _falls(sub(falls, end))
        assert _falls(minimum(falls, Dim("M")))
        assert not _falls(end)
        assert not _grows(falls)
        assert not _falls(sub(rest, falls))


@pytest.mark.parametrize(
    ("d", "rows", "keys", "said"),
    [
        (64, 64, 128, "smaller blocks than 128 x 128"),
        (64, 128, 64, "smaller blocks than 128 x 128"),
        (128, 64, 192, "blocks of no multiple of 128 keys"),
    ],
)
def test_dq_of_short_blocks_takes_a_pass_of_its_own(d: int, rows: int, keys: int, said: str) -> None:
    mask = f"listed(idx, rows = {rows}, keys = {keys})"
    found = refused(planned, mask, accumulate="atomic", d=d, **LISTS)
    message = f"beside lists of {said}, gradients of cuda.sm_90a are of two passes"
    assert (found.code, found.message, found.hints) == (
        "E0602",
        message,
        ("write 'accumulate.dq = two_pass'",),
    )


def test_dq_of_listed_blocks_is_not_added_in_order() -> None:
    """The kernels of mma.sync, which would, walk over no lists."""
    found = refused(planned, "listed(idx, rows = 128, keys = 128)", accumulate="sequential", **LISTS)
    assert found.message == "beside lists, gradients of cuda.sm_90a are of two passes, or dq is atomic"


@pytest.mark.parametrize(
    ("mask", "ways"),
    [
        ("listed(idx, rows = 128, keys = 128)", ("two_pass", "atomic")),
        (f"listed(idx, rows = 128, keys = 128) and {CAUSAL}", ("two_pass", "atomic")),
        ("listed(idx, rows = 64, keys = 64)", ("two_pass", "two_pass")),
    ],
)
def test_dq_of_listed_blocks_is_summed_the_fastest_way(mask: str, ways: tuple[str, str]) -> None:
    variant, _ = planning.resolved(mask, target="cuda.sm_90a", grads="q, k, v", inputs=LISTS["inputs"])
    assert (sum_of_dq(variant, deterministic=True), sum_of_dq(variant, deterministic=False)) == ways


@pytest.mark.parametrize(
    ("mask", "lengths", "options"),
    [
        ("true", "whole", {}),
        (CAUSAL, "shrink", {}),
        ("kv_idx < n[b]", "", {"inputs": ("n: i32[B]",)}),
        ("kv_idx <= q_pos and kv_idx > q_pos - 100", "", {}),
        ("q_pos <= kv_idx", "", {}),
        (f"{CAUSAL} and (q_pos - kv_idx) % 200 < 8", "", {}),
        ("listed(idx, rows = 128, keys = 128)", "", LISTS),
    ],
)
def test_how_far_tiles_walk_follows_from_the_mask(mask: str, lengths: str, options: dict[str, Any]) -> None:
    attention = planned(mask, accumulate="atomic", **options).variant.attention
    assert lengths_of_walks(attention.mask) == lengths
