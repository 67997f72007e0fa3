"""Devices, as far as launches depend on them."""

import functools
from typing import Any, NamedTuple

import torch


class Gpu(NamedTuple):
    """A device. index: -1 for the CPU, where kernels are interpreted or simulated; shared, shared_in_all:
    bytes of shared memory that a block and a multiprocessor have; l2: bytes of cache.
    """

    index: int  # type: ignore[assignment]  # nobody looks for one
    name: str
    capability: tuple[int, int]
    shared: int
    shared_in_all: int
    multiprocessors: int
    l2: int

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


CPU = Gpu(-1, "cpu", (0, 0), 1 << 40, 0, 4, 1 << 20)


@functools.cache
def gpu_of(index: int) -> Gpu:
    """Returns the device of this number; -1 is the CPU."""
    if index < 0:
        return CPU
    found: Any = torch.cuda.get_device_properties(index)  # annotated incompletely by torch
    return Gpu(
        index,
        found.name,
        (found.major, found.minor),
        found.shared_memory_per_block_optin,
        found.shared_memory_per_multiprocessor,
        found.multi_processor_count,
        found.L2_cache_size,
    )
