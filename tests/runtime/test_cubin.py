"""Compiling for a GPU that is not there."""

from pathlib import Path

import pytest

from attnc.build import front, plan_program
from attnc.plan.device import DEVICES
from attnc.plan.resources import estimate
from attnc.runtime.cubin import tool, usage_of

SPECS = Path(__file__).parent.parent.parent / "specs"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_takes_the_shared_memory_that_was_estimated(arch: str) -> None:
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    module = plan_program(front(SPECS / "causal_gqa.attn")).modules[0]
    usage = usage_of(module, 0, DEVICES[arch])
    assert usage is not None
    needs = estimate(module.kernels[0].configs[0], module.variant, DEVICES[arch])
    assert needs.shared <= usage.shared <= needs.shared + 1024  # barriers and scratch
    assert usage.stack < 1024
    assert 32 < usage.registers <= 255
