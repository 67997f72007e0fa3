"""The table of devices is complete and consistent with itself."""

import pytest

from attnc.plan.device import DEVICES, Device

ALL = list(DEVICES.values())


def test_the_supported_architectures_are_there_oldest_first() -> None:
    assert list(DEVICES) == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.arch)
def test_a_block_gets_all_but_a_kib_of_the_shared_memory(device: Device) -> None:
    assert device.shared_per_sm - device.shared_per_block == 1024


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.arch)
def test_tensor_peak_is_a_plausible_number_of_operations_per_clock(device: Device) -> None:
    per_clock = device.tensor_tflops * 1e12 / (device.sms * device.clock_ghz * 1e9)
    assert 400 < per_clock < 10000


def test_capability_is_what_triton_calls_the_architecture() -> None:
    assert DEVICES["sm_90"].capability == 90


def test_exponentials_per_second_of_an_h100() -> None:
    assert DEVICES["sm_90"].exp2_per_second == pytest.approx(3.87e12, rel=0.01)
