"""Ahead of time: machine code beside a generated CUDA module, so that it needs no compiler when it is
called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from attnc.plan import ir
from attnc.plan.device import Device
from attnc.plan.layout import Which
from attnc.runtime.cache import store_bytes
from attnc.runtime.loader import load_file, load_module, program_of
from attnc.runtime.nvrtc import Cubin, compile_cubin, compile_ptx
from attnc.runtime.toolchain import Toolchain, Usage


class Nvrtc(Toolchain):
    """CUDA C++ by NVRTC, launched through the driver."""

    package = "cupy"

    def version(self) -> str:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
        return f"nvrtc {major}.{minor}"

    def usage(self, module: ir.Module, kernel: Which, position: int, device: Device) -> Usage:
        """For rows that are aligned to 16 bytes."""
        planned, program = module.kernels[kernel], program_of(load_module(module))
        options = program.options(program.kernels[planned.name].configs[position], True, device.arch)
        cubin = compile_cubin(program.source(planned.name), options)
        return Usage(registers=cubin.registers, stack=cubin.stack, shared=planned.shared[position])

    def lower(self, module: ir.Module, kernel: Which, position: int, device: Device) -> None:
        """Compiles a kernel to PTX, without ptxas, at the first config for rows that are not of 16 bytes too;
        beside the forward kernel those that its plan does not name.
        """
        planned, program = module.kernels[kernel], program_of(load_module(module))
        known = {planned.name for planned in module.kernels.values()}
        chosen = [(planned.name, program.kernels[planned.name].configs[position])]
        if kernel == "forward" and position == 0:
            chosen += [
                (name, program.kernels[name].configs[0]) for name in program.kernels if name not in known
            ]
        for name, config in chosen:
            for aligned in (True, False)[: 1 + (position == 0)]:
                compile_ptx(program.source(name), program.options(config, aligned, device.arch))


def build_cubins(module: Path, archs: Iterable[str]) -> tuple[Path, ...]:
    """Compiles every config of a generated CUDA module (its `.py` file) for e.g. "sm_90", into `cubin/`
    beside it.

    Rows that are not 16-byte aligned get a kernel of their own. Raises CompilationError, and
    FileNotFoundError without NVRTC."""
    program: Any = program_of(load_file(module))
    folder = module.with_name("cubin")
    folder.mkdir(exist_ok=True)
    paths = []
    for arch in archs:
        for name, kernel in program.kernels.items():
            for config in dict.fromkeys(kernel.configs):
                for aligned in (True, False):
                    path = folder / program.cubin_name(name, config, aligned, arch)
                    options = program.options(config, aligned, arch)
                    store_bytes(path, compile_cubin(program.source(name), options).image)
                    paths.append(path)
    return tuple(paths)


def compile_configs(module: Path, arch: str, name: str | None = None) -> Iterator[tuple[Any, Cubin]]:
    """Every config of one kernel of a generated CUDA module (its forward), with its machine code for aligned
    rows and the compiler's log.
    """
    program: Any = program_of(load_file(module))
    name = next(iter(program.kernels)) if name is None else name
    for config in program.kernels[name].configs:
        yield config, compile_cubin(program.source(name), program.options(config, True, arch))
