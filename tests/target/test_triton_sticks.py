"""What kernels of stick-breaking's gradients hand on at the edges of tiles."""

from __future__ import annotations

import pytest

from attnc.target.files import render_files
from tests.verify.judging import modules_of, spec

PLAIN = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = stick_breaking",
    "output o: bf16[B, M, H, 16]",
)
PACKED = (
    "input q: bf16[T, H, 16] via ragged(ends)",
    "input k, v: bf16[S, H, 16] via ragged(ends)",
    "input ends: i32[B + 1]",
    *PLAIN[2:5],
    "output o: bf16[T, H, 16]",
)


def text_of(lines: tuple[str, ...], grads: str) -> str:
    (module,) = modules_of(spec((*lines, f"grad {grads}"), "tile.q = 16, tile.kv = 16"))
    (text,) = render_files(module, path="sticks.attn", sha256="0").values()
    return text


def test_two_sums_for_each_query_and_tile_of_keys() -> None:
    text = text_of(PLAIN, "q, k, v")
    shape = "f32[B, H, M_padded, max(cdiv(N, dq_config.BLOCK_N), 1)]"
    assert [f'Made("{name}", type="{shape}")' in text for name in ("behind", "before")] == [True, True]


def test_sequences_follow_each_other_where_queries_are_packed() -> None:
    text = text_of(PACKED, "q, k, v")
    assert 'Made("behind", type="f32[H, T, max(cdiv(S, dq_config.BLOCK_N), 1)]")' in text
    assert "tl.cast(kv_lo // BLOCK_N, tl.int64) * M," in text


@pytest.mark.parametrize(("grads", "hands_on"), [("q", False), ("k", True), ("q, k, v", True)])
def test_what_keys_before_give_is_handed_on_where_keys_ask_for_it(grads: str, *, hands_on: bool) -> None:
    assert ('Made("before"' in text_of(PLAIN, grads)) is hands_on


def test_partial_tiles_come_first_on_the_way_back() -> None:
    text = text_of(PLAIN, "q")
    back = text[text.rindex("rest = tl.zeros") :]
    assert back.index("MASKED=True") < back.index("MASKED=False") < back.index("tl.debug_barrier()")
    assert "kv_lo = (tiles - 1 - done) * BLOCK_N" in back
