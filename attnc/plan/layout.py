"""Layouts of kernels on a machine, for targets whose plan decides them; resources of a block; memory traffic
of a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from attnc.model.schedule import TileConfig
from attnc.plan.device import Device

# --- how kernels lie on a machine


#: The kernels of a backward by what they make; "rows" makes what the score loads, and none of these;
#: "dq_kept" makes dq of ds that the one before it has kept.
KernelName: TypeAlias = Literal["dq", "dkdv", "dk", "dv", "rows", "dq_kept"]
#: Any kernel of a module.
Which: TypeAlias = Literal["forward"] | KernelName


class Layout(Protocol):
    """How a forward or decode kernel lies on the machine."""

    def shared_memory(self, config: TileConfig) -> Mapping[str, int]:
        """Returns bytes of shared memory of a block by buffer, in the kernel's order."""

    def registers(self, config: TileConfig) -> Mapping[str, int]:
        """Returns 32-bit registers of a thread by value, those that live through a step."""

    def chosen(self, config: TileConfig) -> Mapping[str, int]:
        """Returns what the layout chooses for a config and a launch has to know, by the names of a generated
        config's fields, in their order; of all configs the same names.
        """


class Roles:
    """What the warps of a forward kernel do that do different things: a frozen dataclass of the target."""


class BackwardLayout(Protocol):
    """How all kernels of a backward lie on the machine."""

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> Mapping[str, int]:
        """Returns bytes of shared memory of a block by buffer, in the kernel's order."""

    def registers(self, config: TileConfig, kernel: KernelName) -> Mapping[str, int]:
        """Returns 32-bit registers of a thread by value, those that live through a step."""

    def walks_for_each(self, kernel: KernelName) -> int:
        """Returns how many walks over queries a multiprocessor has at least before several blocks share one;
        0: none is shared.
        """

    @property
    def joined_rows(self) -> int:
        """Rows of dk or dv, the narrower, whose parts the blocks of a multiprocessor add at a time; 0: none
        has parts.
        """


# --- what a block takes, and what a launch moves


#: Bytes of shared memory that a block must be allowed: one number for all devices; or by the major number of
#: their compute capability, where one number would refuse a device that has enough.
SharedBytes: TypeAlias = int | tuple[tuple[int, int], ...]


def fits(shared: SharedBytes, device: Device) -> bool:
    """Returns whether a device allows a block what a config asks for."""
    wanted = shared if isinstance(shared, int) else dict(shared)[device.major]
    return wanted <= device.shared_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A piece of shared memory: `shape` is for the reader, e.g. "2 x 64x128"."""

    name: str
    shape: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one block of a config needs on one device: shared memory by buffer, registers of a thread by
    value.
    """

    buffers: tuple[Buffer, ...]
    registers: Mapping[str, int]

    @property
    def shared(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def registers_per_thread(self) -> int:
        return sum(self.registers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one launch for one head: asked of and given to global memory, read from and written to
    shared memory.
    """

    global_read: int
    global_written: int
    shared_read: int
    shared_written: int

    def times(self, heads: int) -> Traffic:
        return Traffic(
            global_read=heads * self.global_read,
            global_written=heads * self.global_written,
            shared_read=heads * self.shared_read,
            shared_written=heads * self.shared_written,
        )

    @property
    def moved(self) -> int:
        return self.global_read + self.global_written

    @property
    def shared(self) -> int:
        return self.shared_read + self.shared_written


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes that have to come from device memory and go to it, for all heads of a launch.

    spills: o, l and m of the heads that run at once do not fit the L2 cache between two visits."""

    read: int
    written: int
    spills: bool
