"""Keys that a score forgets: where they are found, and which they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.functions import REAL
from attnc.expr.nodes import Expr
from attnc.plan.decay import _SLOPES, MARGIN, Decay, Why, decay_of, find_decay
from attnc.plan.signature import normalise
from tests.plan.planning import resolved

C = "c: f32[B, H, N] is descending"
SCORE = "dot(q, k) / sqrt(D) + c[b, h, q_pos] - c[b, h, kv_idx]"


def found(score: str, mask: str, *inputs: str) -> Decay | Why | None:
    variant, _ = resolved(mask, score=score, inputs=inputs)
    return find_decay(normalise(variant.attention))


@pytest.mark.parametrize(
    ("score", "slope"),
    [
        (SCORE, 0.125),
        ("c[b, h, q_pos] - c[b, h, kv_idx] + dot(q, k)", 1.0),
        ("0.5 * dot(q, k) - c[b, h, kv_idx] + c[b, h, q_pos]", 0.5),
        ("softcap(dot(q, k) / sqrt(D), 30) + (c[b, h, q_pos] - c[b, h, kv_idx])", 0.125),
        ("max(dot(q, k), -2 * dot(q, k)) - (c[b, h, kv_idx] - c[b, h, q_pos])", 3.0),
        ("-dot(q, k) / 8 + c[b, h, q_pos] - c[b, h, kv_idx] + u[b, q_idx]", 0.125),
    ],
)
def test_scores_that_forget(score: str, slope: float) -> None:
    decay = found(score, "causal", C, "u: f32[B, M]")
    assert isinstance(decay, Decay)
    assert decay.slope == pytest.approx(slope)
    assert decay.share == 2.0**-11


@pytest.mark.parametrize(
    "mask",
    [
        "true",
        "causal and doc[b, q_pos] == doc[b, kv_idx]",
        "window(100, 0)",
        "causal or kv_idx < 4",
        "kv_idx >= q_pos - 7",
    ],
)
def test_masks_that_keep_the_own_key(mask: str) -> None:
    assert isinstance(found(SCORE, mask, C, "doc: i32[B, N]"), Decay)


@pytest.mark.parametrize(
    ("score", "mask", "reason"),
    [
        ("dot(q, k) + c[b, h, kv_idx] - c[b, h, q_pos]", "causal", "the score has no"),
        ("dot(q, k) + c[b, h, q_idx] - c[b, h, kv_idx]", "causal", "the score has no"),
        ("dot(q, k) - c[b, h, kv_idx]", "causal", "the score has no"),
        ("dot(q, k) + 2 * c[b, h, q_pos] - c[b, h, kv_idx]", "causal", "the score has no"),
        ("dot(q, k) + c[0, h, q_pos] - c[b, h, kv_idx]", "causal", "the score has no"),
        (SCORE.replace("b,", "kv_idx,"), "causal", "the other indices"),
        (SCORE.replace("h,", "h + 1,"), "causal", "the other indices"),  # 0 beyond the last head
        (f"{SCORE} + u[b, kv_idx]", "causal", "another term of the score depends on the key"),
        (f"{SCORE} - 0.1 * abs(q_pos - kv_idx)", "causal", "another term of the score depends on the key"),
        (SCORE.replace("sqrt(D)", "t[h]"), "causal", "a factor that is not a constant"),
        (SCORE.replace("dot(q, k)", "dot(q, k) * dot(q, k)"), "causal", "a factor that is not a constant"),
        (SCORE, "kv_idx < q_pos", "its own position"),
        (SCORE, "kv_idx <= q_idx", "its own position"),
        (SCORE, "keep[b, kv_idx] and causal", "its own position"),
    ],
)
def test_why_nothing_is_left_out(score: str, mask: str, reason: str) -> None:
    why = found(score, mask, C, "u: f32[B, N]", "t: f32[H]", "keep: bool[B, N]")
    assert isinstance(why, Why)
    assert reason in why.reason


def test_a_row_for_each_query_says_nothing_of_tiles() -> None:
    why = found(SCORE.replace("b,", "q_idx,"), "causal", C.replace("[B,", "[M,"))
    assert isinstance(why, Why)
    assert "the other indices" in why.reason


def test_nothing_is_said_where_nothing_descends() -> None:
    assert found(SCORE, "causal", C.replace(" is descending", "")) is None


@given(
    steps=st.lists(st.sampled_from((0.0, 0.5, 2.0, 9.0)), min_size=1, max_size=24),
    margin=st.sampled_from((0.5, 3.0, 10.0, float("inf"))),
    rows=st.integers(1, 30),
    tile=st.integers(1, 8),
)
def test_tiles_that_are_left_out_are_beyond_the_margin(
    steps: list[float], margin: float, rows: int, tile: int
) -> None:
    """And nothing that a tile would need is, which is less."""
    variant, _ = resolved("causal", score=SCORE, inputs=(C,))
    decay = decay_of(normalise(variant.attention), "kv")
    assert decay is not None
    keys = len(steps)
    c = -np.cumsum(np.asarray(steps, np.float32))[None, None]
    tensors = {"c": c, MARGIN: np.full((1, 1), margin, np.float32)}
    dims = {"B": 1, "H": 1, "M": rows, "N": keys}

    def value(expr: Expr, indices: Mapping[str, int]) -> int:
        at = {name: np.asarray(index) for name, index in (("b", 0), ("h", 0), *indices.items())}
        return int(evaluate(expr, Env(dims=dims, indices=at, tensors=tensors)))

    def counts(row: int, key: int) -> bool:
        position = row + keys - rows
        return position < 0 or c[0, 0, key] - c[0, 0, position] < margin  # exact: all are few halves

    for first in range(0, rows, tile):
        start = value(decay.start(), {"q_lo": first})
        assert start <= max(first + keys - rows, -1) + 1
        for row in range(first, min(first + tile, rows)):
            assert not any(counts(row, key) for key in range(max(start, 0)) if key <= row + keys - rows)
    for first in range(0, keys, tile):
        last = min(first + tile, keys) - 1
        stop = value(decay.stop(), {"kv_hi": last})
        for row in range(max(stop, 0), rows):
            assert not any(counts(row, key) for key in range(first, last + 1))


def test_heads_that_share_keys_walk_over_all_rows() -> None:
    variant, _ = resolved("causal", score=SCORE, inputs=(C,))
    attention = normalise(variant.attention)
    assert decay_of(attention, "q") is not None


@pytest.mark.parametrize("name", _SLOPES)
def test_no_function_is_steeper_than_is_said(name: str) -> None:
    x = np.linspace(-4, 4, 4001)
    value = abs if name == "abs" else REAL[name].value
    steepest = np.abs(np.diff([value(each) for each in x.tolist()]) / np.diff(x)).max()
    assert 0.99 * _SLOPES[name] < steepest < 1.000001 * _SLOPES[name]
