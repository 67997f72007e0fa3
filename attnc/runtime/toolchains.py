"""All toolchains, by the family of a target. A new one is added to `_TOOLCHAINS`."""

from __future__ import annotations

from collections.abc import Mapping

from attnc.plan.device import Device
from attnc.plan.ir import Module
from attnc.plan.layout import Which
from attnc.plan.targets import target_of
from attnc.runtime.aot import Nvrtc
from attnc.runtime.cubin import TritonCompiler
from attnc.runtime.toolchain import Toolchain, Usage

_TOOLCHAINS: Mapping[str, Toolchain] = {"triton": TritonCompiler(), "sm80": Nvrtc(), "sm90": Nvrtc()}


def toolchain_of(target: str) -> Toolchain:
    """What compiles the kernels of a target of this name."""
    return _TOOLCHAINS[target_of(target).family]


def usage_of(module: Module, position: int, device: Device, kernel: Which = "forward") -> Usage | None:
    """Compiles a kernel of a planned module at one of its configs for a device; None without cuobjdump."""
    return toolchain_of(module.target).usage(module, kernel, position, device)


def lower(module: Module, position: int, device: Device, kernel: Which = "forward") -> None:
    """Has the front end of the target's compiler read a kernel; raises what it raises."""
    toolchain_of(module.target).lower(module, kernel, position, device)
