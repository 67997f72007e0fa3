"""Which devices run the kernels of a target."""

from __future__ import annotations

from dataclasses import replace

from attnc.plan.device import DEVICES
from attnc.plan.targets import TARGETS


def test_what_is_newer_than_a_target_runs_its_kernels() -> None:
    capabilities = (75, 80, 90, 103, 130)
    assert [TARGETS["cuda.sm_80"].runs_on(one) for one in capabilities] == [False, True, True, True, True]
    assert [TARGETS["cuda.sm_100"].runs_on(one) for one in capabilities] == [False, False, False, True, True]
    alone = replace(TARGETS["cuda.sm_80"], devices=(DEVICES["sm_90"],))
    assert [alone.runs_on(one) for one in capabilities] == [False, False, True, False, False]
