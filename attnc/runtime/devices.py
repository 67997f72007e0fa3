"""The GPUs of this machine, as far as PyTorch sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A CUDA device; memory in bytes."""

    name: str
    arch: str
    memory: int


def gpus() -> tuple[CudaDevice, ...]:
    """Returns all CUDA devices, in PyTorch's order; empty without a driver or with a CPU build."""
    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(CudaDevice(name=p.name, arch=f"sm_{p.major}{p.minor}", memory=p.total_memory) for p in found)


def is_cpu_build() -> bool:
    """Returns whether this PyTorch could not use a GPU even if there were one."""
    return torch.version.cuda is None


def on_device_of(x: torch.Tensor) -> Any:
    """Returns what makes the device of a tensor the current one, on whose current stream Triton launches: a
    process may have another. Of tensors on the CPU, where kernels are interpreted, it changes nothing.
    """
    return torch.cuda.device(x.device if x.is_cuda else -1)
