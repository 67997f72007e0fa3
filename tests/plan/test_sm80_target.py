"""What the CUDA targets allow a block, by their devices."""

from __future__ import annotations

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.plan.device import DEVICES
from attnc.plan.layout import fits
from tests.plan.planning import planned


def test_a_block_may_take_what_the_devices_of_its_target_allow() -> None:
    tiles = "tile.q = 64, tile.kv = 128, stages = 2"  # 144 KiB at D = 128
    shared = planned(schedule=tiles, d=128, target="cuda.sm_80").kernel.shared[0]
    assert [arch for arch, device in DEVICES.items() if fits(shared, device)] == ["sm_80", "sm_90", "sm_100"]
    with pytest.raises(DiagnosticError, match=r"fits cuda\.sm_120"):
        planned(schedule=tiles, d=128, target="cuda.sm_120")
