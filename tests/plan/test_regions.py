"""Loop bounds of the usual masks, as they stand in the kernels, and what a tile count of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr
from attnc.plan.ir import Kernel, Let
from attnc.plan.regions import regions, shows_more_past_the_end
from attnc.target.triton.printer import scalar, statement
from tests.expr.masks import Case, cases, masks
from tests.expr.spell import spell
from tests.plan.planning import planned

Ints: TypeAlias = npt.NDArray[np.int64]

BOUNDS = {
    "true": ["full_hi = N // BLOCK_N * BLOCK_N"],
    "causal": [
        "first_pos = q_lo + N - M",
        "last_pos = q_hi + N - M",
        "hi = last_pos + 1",
        "full_hi = tl.maximum(first_pos + 1, 0) // BLOCK_N * BLOCK_N",
    ],
    "window(128, 0)": [
        "first_pos = q_lo + N - M",
        "last_pos = q_hi + N - M",
        "lo = tl.maximum(first_pos - 128, 0) // BLOCK_N * BLOCK_N",
        "hi = last_pos + 1",
        "full_lo = tl.maximum(last_pos - 128, 0)",
        "full_hi = first_pos + 1",
    ],
    "kv_idx < 100": ["hi = tl.minimum(100, N)", "full_hi = tl.minimum(100, N) // BLOCK_N * BLOCK_N"],
}


def bounds(kernel: Kernel) -> list[str]:
    return [statement(item) for item in kernel.regions.bounds]


@pytest.mark.parametrize("mask", BOUNDS)
def test_bounds_read_as_a_person_would_write_them(mask: str) -> None:
    kernel = planned(mask).kernel
    assert bounds(kernel) == BOUNDS[mask]


def test_one_side_partial_makes_a_full_loop_and_a_partial_one() -> None:
    kernel = planned("causal").kernel
    assert [loop.masked for loop in kernel.regions.loops] == [False, True]


def test_two_sides_partial_make_one_loop_that_tests_its_tiles() -> None:
    kernel = planned("window(128, 0)").kernel
    (loop,) = kernel.regions.loops
    assert not isinstance(loop.masked, bool)
    assert scalar(loop.masked) == "(kv_lo < full_lo) | (kv_lo + BLOCK_N > full_hi)"


def test_a_mask_without_full_tiles_has_only_a_partial_loop() -> None:
    kernel = planned("(q_pos - kv_idx) % 2 == 0").kernel
    assert [loop.masked for loop in kernel.regions.loops] == [True]


def test_the_end_of_the_keys_is_tested_only_where_the_mask_does_not_imply_it() -> None:
    def keep(mask: str) -> str:
        kernel = planned(mask).kernel
        assert kernel.step.keep is not None
        return scalar(kernel.step.keep)

    assert keep("causal") == "kv_idx <= q_pos"
    assert keep("true") == "kv_idx < N"
    assert keep("q_idx < 3") == "(kv_idx < N) & (q_idx < 3)"


MASKS: dict[str, Callable[[Ints, Ints], npt.NDArray[np.bool_]]] = {
    "true": lambda q, kv: np.ones(np.broadcast(q, kv).shape, bool),
    "causal": lambda q, kv: kv <= q,
    "window(20, 3)": lambda q, kv: (q - 20 <= kv) & (kv <= q + 3),
    "chunk(24) and causal": lambda q, kv: (q // 24 == kv // 24) & (kv <= q),
    "kv_idx < 5 or window(7, 0)": lambda q, kv: (kv < 5) | ((q - 7 <= kv) & (kv <= q)),
    "not causal": lambda q, kv: kv > q,
    "q_pos < 0": lambda q, kv: (q < 0) & (kv > -1),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("m", "n"), [(70, 70), (33, 90), (90, 33), (1, 64), (40, 0)])
@pytest.mark.parametrize("order", ["[q, kv]", "[kv, q]"])
def test_every_kept_element_is_visited_once_and_full_tiles_keep_all(
    mask: str, m: int, n: int, order: str
) -> None:
    softmax = "" if order == "[q, kv]" else ", softmax = online(rescale = every_step)"
    kernel = planned(mask, schedule=f"  loops = {order}{softmax}").kernel
    bm, bn = 16, 32
    kept = MASKS[mask](np.arange(m)[:, None] + n - m, np.arange(n)[None, :])
    visited = np.zeros((m, n), int)
    outer, inner = ((m, bm), (n, bn)) if order == "[q, kv]" else ((n, bn), (m, bm))
    for start in range(0, outer[0], outer[1]):
        for at, masked in tiles(kernel, start, outer, inner, {"M": m, "N": n, "BLOCK_M": bm, "BLOCK_N": bn}):
            rows, columns = (slice(start, start + bm), slice(at, at + bn))
            if order == "[kv, q]":
                rows, columns = (slice(at, at + bm), slice(start, start + bn))
            visited[rows, columns] += 1
            assert masked or (kept[rows, columns].all() and columns.stop <= n)
    assert (visited[kept] == 1).all()
    assert visited.max(initial=0) <= 1


def tiles(
    kernel: Kernel, start: int, outer: tuple[int, int], inner: tuple[int, int], dims: dict[str, int]
) -> list[tuple[int, bool]]:
    """(start, evaluates the mask) of the inner tiles that the kernel's own bounds give for one outer tile."""
    axis, other = ("q", "kv") if kernel.regions.axis == "kv" else ("kv", "q")
    last = min(start + outer[1], outer[0]) - 1
    env = Env(indices={f"{axis}_lo": start, f"{axis}_hi": last, "b": 0, "h": 0}, dims=dims, names={})

    def value(expr: Expr, **more: int) -> int:
        here = Env(indices={**env.indices, **more}, dims=dims, names=names)
        return int(np.asarray(evaluate(expr, here)))

    names: dict[str, int] = {}
    for item in kernel.regions.bounds:
        assert isinstance(item, Let)
        names[item.name] = value(item.value)
    found = []
    for loop in kernel.regions.loops:
        for at in range(value(loop.start), value(loop.stop), inner[1]):
            ends = {f"{other}_lo": at, f"{other}_hi": min(at + inner[1], inner[0]) - 1}
            if loop.guard is None or value(loop.guard, **ends):
                masked = loop.masked if isinstance(loop.masked, bool) else bool(value(loop.masked, **ends))
                found.append((at, masked))
    return found


#: Masks, and whether a row past the end may see a key that no row sees.
SHOWN = {
    "kv_idx <= q_pos": False,
    "q_pos - 128 <= kv_idx and kv_idx <= q_pos": False,
    "kv_idx < kv_len[b] or q_pos - 5 <= kv_idx": False,
    "kv_idx <= q_idx + N - M": False,
    "keep[b, kv_idx]": False,
    "kv_idx < q_pos": True,
    "kv_idx <= q_idx": True,
    "q_pos // 4 == kv_idx // 4": True,
    "doc[b, q_pos] == doc[b, kv_idx] and kv_idx <= q_pos": True,
}


@pytest.mark.parametrize("mask", SHOWN)
def test_which_keys_rows_past_the_end_may_see(mask: str) -> None:
    assert shows_more_past_the_end(spell(mask)) == SHOWN[mask]


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(mask=masks(), drawn=cases())
def test_rows_past_the_end_see_no_more_where_that_is_said(mask: Expr, drawn: Case) -> None:
    if shows_more_past_the_end(mask):
        return
    rows = np.arange(drawn.m + 20)[:, None]
    env = Env(indices={**drawn.env.indices, "q_idx": rows}, dims=drawn.env.dims, tensors=drawn.env.tensors)
    seen = np.broadcast_to(evaluate(mask, env).astype(bool), (len(rows), drawn.n))
    assert not (seen[drawn.m :].any(axis=0) & ~seen[: drawn.m].any(axis=0)).any()


SORTED = ("doc[b, kv_idx] <= 3", "doc[b, kv_idx] < doc[b, q_pos]", "doc[b, kv_idx] == doc[b, q_pos]")


@settings(max_examples=settings().max_examples // 4)
@given(mask=masks(), drawn=cases())
def test_keys_past_the_end_are_masked_where_tiles_do_not_test_the_length(mask: Expr, drawn: Case) -> None:
    """A sorted tensor reads 0 there, which may be what a search looks for."""
    keys = np.arange(drawn.n, drawn.n + 20)[None, :]
    env = Env(indices={**drawn.env.indices, "kv_idx": keys}, dims=drawn.env.dims, tensors=drawn.env.tensors)
    for one in (mask, *map(spell, SORTED)):
        _, tests_length = regions(one, "kv", None)
        assert tests_length or not evaluate(one, env).any()
    assert not regions(spell("kv_idx <= q_pos"), "kv", None)[1]
