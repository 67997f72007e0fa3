"""Devices, as far as launches depend on them."""

from __future__ import annotations

from attnc.support.devices import CPU, gpu_of
from tests.support.configs import H200


def test_the_cpu_is_a_device() -> None:
    assert gpu_of(-1) is CPU
    assert H200.arch == "sm_90"
