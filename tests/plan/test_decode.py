"""How many programs may share a row's keys: as many as it visits, which a window limits."""

from __future__ import annotations

import pytest

from attnc.plan.ir import split_of
from attnc.target.files import render_files
from tests.plan.planning import planned
from tests.plans import plans_of

SCHEDULES = {
    "triton": "  loops = [kv], tile.q = 16, tile.kv = 64\n  split.kv = auto",
    "cuda.sm_80": "  loops = [kv], tile.q = 16, tile.kv = 64, warp_split = kv\n  split.kv = auto",
}


@pytest.mark.parametrize("target", SCHEDULES)
@pytest.mark.parametrize(
    ("mask", "inputs", "keys"),
    [
        ("true", (), None),
        ("causal", (), None),
        ("window(128, 0)", (), 129),
        ("window(100, 30) and kv_idx >= 16", (), 131),
        ("kv_idx < 100", (), 100),
        ("causal and kv_idx < 100", (), 100),
        ("causal or kv_idx < 100", (), None),
        ("kv_idx < kv_len[b]", ("kv_len: i32[B]",), None),
        ("causal and q_pos - kv_idx <= far[b]", ("far: i32[B]",), None),
    ],
)
def test_the_keys_a_row_can_see(mask: str, inputs: tuple[str, ...], keys: int | None, target: str) -> None:
    module = planned(mask, inputs=inputs, schedule=SCHEDULES[target], target=target)
    split = split_of(module.kernel)
    assert split is not None
    assert split.max_visible_keys == keys


@pytest.mark.parametrize("target", SCHEDULES)
def test_splits_are_counted_for_a_window_not_for_the_cache(target: str) -> None:
    module = planned("window(128, 0)", schedule=SCHEDULES[target], target=target)
    files = render_files(module, path="spec.attn", sha256="", tuned={})
    (text,) = (text for name, text in files.items() if name.endswith(".py"))
    (line,) = (line for line in text.splitlines() if "key_tiles=" in line)
    assert "min(N, 129 + BLOCK_M)" in line


def test_splits_are_counted_for_a_list_not_for_the_cache() -> None:
    (module,) = (m for m in plans_of("selected_tokens").modules if m.target == "cuda.sm_90a")
    files = render_files(module, path="spec.attn", sha256="", tuned={})
    assert 'key_tiles="cdiv(min(N, S), BLOCK_N)"' in files[f"{module.variant.name}.py"]
    (module,) = plans_of("selected_steps").modules  # of blocks
    text = render_files(module, path="spec.attn", sha256="", tuned={})[f"{module.variant.name}.py"]
    assert 'key_tiles="cdiv(min(N, S * 64), BLOCK_N)"' in text
    assert "split_hi = tl.minimum(split_lo + split_size, listed * 64)" in text  # in 32 bits
