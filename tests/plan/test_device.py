"""The table of devices is complete and consistent with itself."""

import math

import pytest

from attnc.plan.device import DEVICES, Device

ALL = list(DEVICES.values())


def test_the_supported_architectures_are_there_oldest_first() -> None:
    assert list(DEVICES) == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.arch)
def test_a_block_gets_all_but_a_kib_of_the_shared_memory(device: Device) -> None:
    assert device.shared_per_sm - device.shared_per_block == 1024


def test_capability_is_what_triton_calls_the_architecture() -> None:
    assert DEVICES["sm_90"].capability == 90


def test_exponentials_per_second_of_an_h100() -> None:
    assert DEVICES["sm_90"].exp2_per_second == pytest.approx(3.87e12, rel=0.01)


#: Multiprocessors, MiB of the L2 cache, dense bf16 TFLOP/s, GB/s and boost clock, as data sheets have them.
SHEETS = {
    "sm_80": (108, 40, 312.0, 2039.0, 1.41),
    "sm_86": (72, 6, 125.0, 600.0, 1.695),
    "sm_89": (142, 96, 362.0, 864.0, 2.52),
    "sm_90": (132, 50, 989.0, 3350.0, 1.83),
    "sm_100": (148, 126, 2250.0, 8000.0, 1.85),
    "sm_120": (170, 96, 209.5, 1792.0, 2.41),
}
#: KiB of shared memory of a multiprocessor, by capability (CUDA C++ Programming Guide).
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.arch)
def test_a_device_is_as_its_sheet_says(device: Device) -> None:
    ceilings = device.tensor_tflops, device.bandwidth_gbs, device.clock_ghz
    assert (device.sms, device.l2 / 2**20, *ceilings) == SHEETS[device.arch]
    assert device.shared_per_sm == SHARED[device.capability] << 10
    assert (device.registers_per_thread, device.exp2_per_clock) == (255, 16)
    assert device.has_tma == (device.major >= 9)
    assert device.has_mma_from_shared == (device.major in (9, 10))
    assert device.has_tensor_memory == (device.major == 10)
    fused = device.tensor_tflops * 1e12 / (device.sms * device.clock_ghz * 2e9)
    assert abs(math.log2(fused) - round(math.log2(fused))) < 0.03  # a power of two for each clock
