# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Machine code of CUDA kernels: compiled by NVRTC for the GPU at hand, and kept."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .cache import cache_folder, store_bytes
from .configs import KernelConfig


class Compiled(NamedTuple):
    """A kernel of a module: its name, the file that it is in, and what it is compiled with."""

    name: str
    file: str
    configs: tuple[KernelConfig, ...]


class Program:
    """The kernels of a module and their sources: files beside the module, or texts by name."""

    def __init__(self, module: str, kernels: tuple[Compiled, ...], sources: Mapping[str, str] | None) -> None:
        self.module = Path(module)
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self.sources = sources
        self._texts: dict[str, str] = {}
        self._functions: dict[object, Any] = {}

    def source(self, name: str) -> str:
        """Returns the text of a kernel, with that of the header that it includes."""
        file = self.kernels[name].file
        if file not in self._texts:
            self._texts[file] = included(self._read(file), self._read)
        return self._texts[file]

    def forget(self) -> None:
        """Drops the texts that have been read, and functions."""
        self._texts.clear()
        self._functions.clear()

    def options(self, config: KernelConfig, aligned: bool, arch: str) -> tuple[str, ...]:
        """Returns what NVRTC is told. aligned: rows start at multiples of 16 bytes; arch: such as "sm_90"."""
        defines = (f"-D{name}={value}" for name, value in defined(config, aligned).items())
        return (f"-arch={arch}", "-std=c++17", *defines)

    def cubin_name(self, name: str, config: KernelConfig, aligned: bool, arch: str) -> str:
        """Returns a hash of all that the machine code is made from."""
        text = "\0".join((*self.options(config, aligned, arch), self.source(name)))
        return hashlib.sha256(text.encode()).hexdigest() + ".cubin"

    def cubin(self, name: str, config: KernelConfig, aligned: bool, arch: str) -> Path:
        """Returns the machine code: from beside the module, from the user's cache, or compiled now."""
        file_name = self.cubin_name(name, config, aligned, arch)
        shipped = self.module.with_name("cubin") / file_name
        if shipped.is_file():
            return shipped
        cached = cache_folder() / file_name
        if not cached.is_file():
            image = self.compile(name, self.options(config, aligned, arch))
            store_bytes(cached, image)
        return cached

    def compile(self, name: str, options: tuple[str, ...]) -> bytes:
        """Returns the machine code of a kernel. RuntimeError with the log of what NVRTC refuses."""
        from cupy.cuda import nvrtc

        file = self.kernels[name].file
        program = nvrtc.createProgram(self.source(name), file, (), ())
        try:
            nvrtc.compileProgram(program, options)
            image: bytes = nvrtc.getCUBIN(program)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{file} {options}: {nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)
        return image

    def function(self, name: str, config: KernelConfig, aligned: bool, device: int, arch: str) -> Any:
        """Returns the compiled kernel on the current device, which has this number."""
        key = (name, config, aligned, device)
        if key not in self._functions:
            import cupy

            path = self.cubin(name, config, aligned, arch)
            with uncaptured():
                kernel = cupy.RawModule(path=str(path)).get_function(name)
                kernel.max_dynamic_shared_size_bytes = config.shared
                self._functions[key] = kernel.kernel  # of this device
        return self._functions[key]

    def _read(self, file: str) -> str:
        if self.sources is not None:
            return self.sources[file]
        beside = self.module.with_name(file)
        return (beside if beside.is_file() else Path(__file__).with_name(file)).read_text(encoding="utf-8")


#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


@contextmanager
def uncaptured() -> Iterator[None]:
    """While code is loaded, which is no part of a graph that this thread captures: the driver allows it then,
    and not otherwise.
    """
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # leaves the mode that was there
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def included(source: str, read: Callable[[str], str]) -> str:
    """Returns a source with the headers in the place of the lines that include them, so that it is compiled
    alone.

    read: the text of a header by its name; it may include others.
    """
    lines = []
    for line in source.splitlines(keepends=True):
        if line.startswith('#include "') and (name := line.split('"')[1]).endswith(".cuh"):
            lines.append(included(read(name), read))
        else:
            lines.append(line)
    return "".join(lines)


def defined(config: KernelConfig, aligned: bool) -> dict[str, int]:
    """Returns what a kernel is compiled with, by name."""
    names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES", "BLOCK_D")
    sizes = {name: int(getattr(config, name)) for name in names if hasattr(config, name)}
    if limit := getattr(config, "maxnreg", 0):
        sizes["MAXNREG"] = int(limit)
    return {**sizes, "ALIGNED": int(aligned)}
