"""The forward kernel, for both loop orders."""

from __future__ import annotations

import pytest

from tests.plan.cuda import planned
from tests.targets import TARGETS


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "cuda.sm_90a"])
def test_flash_attention_1_renormalises_in_every_step(target: str) -> None:
    knobs = "loops = [kv, q], tile.q = 64, tile.kv = 64, warps = 4"
    implied = planned(knobs, target=target).kernel
    said = planned(f"{knobs}, softmax = online(rescale = every_step)", target=target).kernel
    assert implied.softmax == said.softmax
    assert implied.bound == said.bound
    assert implied.bound.renormalised
