"""What compilers say of kernels, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnc.plan.device import DEVICES, Device
from attnc.plan.ir import Module
from attnc.plan.layout import Which
from attnc.plan.triton.resources import unreadable
from attnc.runtime.loader import load_file, program_of
from attnc.runtime.nvrtc import Cubin, compile_cubin
from attnc.runtime.toolchains import toolchain_of, usage_of


def refusals(
    module: Module, *, whole: bool = False, archs: Sequence[str] = ("sm_90", "sm_80")
) -> dict[str, str]:
    """What the compiler of the module's target says of each kernel and config that it does not take.

    whole: down to machine code, which knows of registers; else its front end alone, in a tenth of the time.
    archs: those for which Triton's kernels are compiled, whose text asks which it is; CUDA's are of one.
    Triton's kernels have to be out of reach of its interpreter (`tests.processes.compiling`).
    """
    found = {}
    for kernel, position, device in _each(module, archs if module.target == "triton" else ("sm_90",)):
        try:
            if whole:
                usage_of(module, position, device, kernel)
            else:
                toolchain_of(module.target).lower(module, kernel, position, device)
        except Exception as error:
            found[f"{kernel} {position} {device.arch}"] = f"{type(error).__name__}: {error}"
    return found


def _each(module: Module, archs: Sequence[str]) -> Iterator[tuple[Which, int, Device]]:
    """Every kernel, config and architecture."""
    for name, kernel in module.kernels.items():
        for position in range(len(kernel.configs)):
            for arch in archs:
                if not unreadable(module.variant.attention, DEVICES[arch]):
                    yield name, position, DEVICES[arch]


def compile_configs(module: Path, arch: str, name: str | None = None) -> Iterator[tuple[Any, Cubin]]:
    """Yields every config of one kernel of a generated CUDA module (its forward), with its machine code for
    aligned rows and the compiler's log.
    """
    program: Any = program_of(load_file(module))
    name = next(iter(program.kernels)) if name is None else name
    for config in program.kernels[name].configs:
        yield config, compile_cubin(program.source(name), program.options(config, True, arch))
