"""How kernels lie on a machine, where the plan decides it and no compiler: what every layout says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from attnc.model.schedule import TileConfig

#: The kernels of a backward by what they make; "rows" makes what the score loads, and none of these.
KernelName: TypeAlias = Literal["dq", "dkdv", "dk", "dv", "rows"]
#: Any kernel of a module.
Which: TypeAlias = Literal["forward"] | KernelName


class Layout(Protocol):
    """Of a forward or decode kernel."""

    def shared_memory(self, config: TileConfig) -> Mapping[str, int]:
        """Bytes of shared memory of a block by buffer, in the kernel's order."""

    def registers(self, config: TileConfig) -> Mapping[str, int]:
        """32-bit registers of a thread by value, those that live through a step."""

    def chosen(self, config: TileConfig) -> tuple[int, ...]:
        """What the layout chooses for a config and a launch has to know: fields of a generated config."""


class BackwardLayout(Protocol):
    """Of all kernels of a backward."""

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> Mapping[str, int]:
        """Bytes of shared memory of a block by buffer, in the kernel's order."""

    def registers(self, config: TileConfig, kernel: KernelName) -> Mapping[str, int]:
        """32-bit registers of a thread by value, those that live through a step."""
