"""What each supported GPU architecture offers: the limits that a config must obey and the ceilings of its
roofline.

Limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (the
opt-in shared memory of a block is the multiprocessor's minus 1 KiB that the system keeps) and the arithmetic
throughput table (special functions: 16 a clock). Ceilings are the data sheet figures of the part named by
`part`: dense bf16 with f32 accumulation, no sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One compute capability.

    shared_per_block, shared_per_sm, l2 (cache): bytes; registers: 32-bit registers; tensor_tflops: dense
    bf16, TFLOP/s; bandwidth_gbs: GB/s of device memory; clock_ghz: boost clock; exp2_per_clock: exponentials
    of one SM per clock; has_mma_from_shared: tensor cores read operands where they lie (wgmma, tcgen05.mma);
    has_tensor_memory: they write to memory of their own (tcgen05.mma).
    """

    arch: str
    part: str
    shared_per_block: int
    shared_per_sm: int
    registers_per_thread: int
    sms: int
    l2: int
    tensor_tflops: float
    bandwidth_gbs: float
    clock_ghz: float
    exp2_per_clock: int = 16
    has_tma: bool = False
    has_mma_from_shared: bool = False
    has_tensor_memory: bool = False

    @property
    def capability(self) -> int:
        return int(self.arch.removeprefix("sm_"))

    @property
    def major(self) -> int:
        return self.capability // 10

    @property
    def exp2_per_second(self) -> float:
        return self.sms * self.exp2_per_clock * self.clock_ghz * 1e9


_KIB, _MIB = 1024, 1 << 20

_DEVICES = (
    # NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM.
    Device(
        arch="sm_80",
        part="NVIDIA A100 SXM 80GB",
        shared_per_block=163 * _KIB,
        shared_per_sm=164 * _KIB,
        registers_per_thread=255,
        sms=108,
        l2=40 * _MIB,
        tensor_tflops=312.0,
        bandwidth_gbs=2039.0,
        clock_ghz=1.41,
    ),
    # NVIDIA A10 Tensor Core GPU data sheet.
    Device(
        arch="sm_86",
        part="NVIDIA A10",
        shared_per_block=99 * _KIB,
        shared_per_sm=100 * _KIB,
        registers_per_thread=255,
        sms=72,
        l2=6 * _MIB,
        tensor_tflops=125.0,
        bandwidth_gbs=600.0,
        clock_ghz=1.695,
    ),
    # NVIDIA L40S data sheet; 362 TFLOP/s is the dense half of the figure with sparsity.
    Device(
        arch="sm_89",
        part="NVIDIA L40S",
        shared_per_block=99 * _KIB,
        shared_per_sm=100 * _KIB,
        registers_per_thread=255,
        sms=142,
        l2=96 * _MIB,
        tensor_tflops=362.0,
        bandwidth_gbs=864.0,
        clock_ghz=2.52,
    ),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM5 80 GB. An H200 is the same processor with 4800 GB/s.
    Device(
        arch="sm_90",
        part="NVIDIA H100 SXM",
        shared_per_block=227 * _KIB,
        shared_per_sm=228 * _KIB,
        registers_per_thread=255,
        sms=132,
        l2=50 * _MIB,
        tensor_tflops=989.0,
        bandwidth_gbs=3350.0,
        clock_ghz=1.83,
        has_tma=True,
        has_mma_from_shared=True,
    ),
    # NVIDIA DGX B200 data sheet, an eighth of the machine.
    Device(
        arch="sm_100",
        part="NVIDIA B200",
        shared_per_block=227 * _KIB,
        shared_per_sm=228 * _KIB,
        registers_per_thread=255,
        sms=148,
        l2=126 * _MIB,
        tensor_tflops=2250.0,
        bandwidth_gbs=8000.0,
        clock_ghz=1.85,
        has_tma=True,
        has_mma_from_shared=True,
        has_tensor_memory=True,
    ),
    # NVIDIA RTX Blackwell GPU architecture white paper, table of the GeForce RTX 5090.
    Device(
        arch="sm_120",
        part="NVIDIA GeForce RTX 5090",
        shared_per_block=99 * _KIB,
        shared_per_sm=100 * _KIB,
        registers_per_thread=255,
        sms=170,
        l2=96 * _MIB,
        tensor_tflops=209.5,
        bandwidth_gbs=1792.0,
        clock_ghz=2.41,
        has_tma=True,
    ),
)

#: By architecture, oldest first.
DEVICES: Mapping[str, Device] = MappingProxyType({device.arch: device for device in _DEVICES})


def devices_from(arch: str) -> tuple[Device, ...]:
    """Returns the devices of an architecture and of newer ones, which run what was compiled for it."""
    return tuple(device for device in _DEVICES if device.capability >= DEVICES[arch].capability)
