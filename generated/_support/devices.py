# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Devices, as far as launches depend on them."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Gpu(NamedTuple):
    """A device. index: -1 for the CPU, where kernels are interpreted or simulated; shared, shared_in_all:
    bytes of shared memory that a block and a multiprocessor have; l2, memory: bytes of cache, and in all.
    """

    index: int  # type: ignore[assignment]  # nobody looks for one
    name: str
    capability: tuple[int, int]
    shared: int
    shared_in_all: int
    multiprocessors: int
    l2: int
    memory: int

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


CPU = Gpu(-1, "cpu", (0, 0), 1 << 40, 0, 4, 1 << 20, 1 << 40)


@functools.cache
def gpu_of(index: int) -> Gpu:
    """Returns the device of this number; -1 is the CPU. ValueError where a user's setting is wrong: at the
    first call of all, not at the first that reads it.
    """
    kept_by_user()
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
        found.total_memory,
    )


#: Bytes of ds that a call keeps in memory at once, at most: in all, and of a device's memory one in so many.
MOST_KEPT, KEPT_SHARE = 4 << 30, 32


def functions_of(gpu: Gpu) -> dict[str, Callable[..., int]]:
    """Returns what texts of sizes call of a device."""
    return {
        "kept_room()": lambda: kept_room(gpu),
        "l2()": lambda: gpu.l2,
        "multiprocessors()": lambda: gpu.multiprocessors,
    }


def kept_room(gpu: Gpu) -> int:
    """Returns the bytes that gradients beside lists may take for ds, which spare them products; gradients are
    the same bits.
    """
    given = kept_by_user()
    return min(MOST_KEPT, gpu.memory // KEPT_SHARE) if given is None else given


def kept_by_user() -> int | None:
    """Returns the bytes that ATTNC_KEPT_MIB says, 0 for none; None where it says nothing. ValueError where
    it says no number.
    """
    given = os.environ.get("ATTNC_KEPT_MIB", "")
    if not given:
        return None
    if not (given.isascii() and given.isdigit()):
        raise ValueError(
            f"ATTNC_KEPT_MIB, of the environment: expected a number of MiB, such as 4096, or 0, got {given!r}"
        )
    return int(given) << 20
