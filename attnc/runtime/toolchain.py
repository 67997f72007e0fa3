"""What compiles the kernels of a family of targets: the interface (`runtime.toolchains` has them all)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from attnc.plan.device import Device
from attnc.plan.ir import Module
from attnc.plan.layout import Which


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one block of a compiled kernel takes: registers of a thread, bytes of stack (spills) and shared
    memory.
    """

    registers: int
    stack: int
    shared: int


class Toolchain(ABC):
    """package: the library that generated modules import besides torch."""

    package: ClassVar[str]

    @abstractmethod
    def version(self) -> str:
        """What compiles the kernels here, as tuned files call it."""

    @abstractmethod
    def usage(self, module: Module, kernel: Which, position: int, device: Device) -> Usage | None:
        """Compiles a kernel of a planned module at one of its configs for a device, which need not be there;
        None where nothing reads machine code. Raises what the compiler raises.
        """

    @abstractmethod
    def lower(self, module: Module, kernel: Which, position: int, device: Device) -> None:
        """The same as far as the compiler's front end goes, which is quick: it sees names that nothing
        declares and types that do not go together, and knows nothing of registers. Raises what it raises.
        """
