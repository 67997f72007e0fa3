# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Machine code of CUDA kernels: compiled by NVRTC for the GPU at hand, and kept."""

import ctypes
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .cache import kept_entry, unseal_bytes
from .configs import KernelConfig

#: What a source says it is to be compiled with, besides what its configs say.
_FLAGS = re.compile(r"^// nvrtc: (\S+)$", re.MULTILINE)


class Compiled(NamedTuple):
    """A kernel of a module: its name, the file that it is in, and what it is compiled with."""

    name: str
    file: str
    configs: tuple[KernelConfig, ...]


class Program:
    """The kernels of a module, and their sources by name: texts, or files beside the module.

    element: the type that they are compiled for, "" where their text says it.
    """

    def __init__(
        self,
        module: str,
        kernels: tuple[Compiled, ...],
        sources: Mapping[str, str] | None,
        element: str = "",
    ) -> None:
        self.module = Path(module)
        self.kernels: dict[str, Compiled] = {}
        for kernel in kernels:  # one that is launched in several forms has the configs of all
            known = self.kernels.get(kernel.name, kernel._replace(configs=()))
            self.kernels[kernel.name] = known._replace(configs=known.configs + kernel.configs)
        self.sources, self.element = sources, element
        self._texts: dict[str, str] = {}
        self._functions: dict[object, Any] = {}

    def source(self, name: str) -> str:
        """Returns the text of a kernel, with that of the header that it includes."""
        file = self.kernels[name].file
        if file not in self._texts:
            self._texts[file] = inline_headers(self._read(file), self._read)
        return self._texts[file]

    def forget(self) -> None:
        self._texts.clear()
        self._functions.clear()

    def options(self, config: KernelConfig, aligned: bool, arch: str) -> tuple[str, ...]:
        """Returns what NVRTC is told. aligned: rows start at multiples of 16 bytes; arch: such as "sm_90"."""
        return (f"-arch={arch}", "-std=c++17", *self.list_flags(list_defines(config, aligned)))

    def list_flags(self, numbers: Mapping[str, int]) -> list[str]:
        """Returns these macros and that of the element type, as NVRTC is told of them."""
        macros = {**({"ELEMENT": self.element} if self.element else {}), **numbers}
        return [f"-D{name}={value}" for name, value in macros.items()]

    def cubin_name(self, name: str, config: KernelConfig, aligned: bool, arch: str) -> str:
        """Returns a hash of all that the machine code is made from."""
        text = "\0".join((*self.options(config, aligned, arch), self.source(name)))
        return hashlib.sha256(text.encode()).hexdigest() + ".cubin"

    def cubin(self, name: str, config: KernelConfig, aligned: bool, arch: str) -> Path:
        """Returns the file of the machine code, from beside the module, from the user's cache, or compiled
        now. Its digest, which stands behind the code, has been checked.
        """
        file_name = self.cubin_name(name, config, aligned, arch)
        shipped = self.module.with_name("cubin") / file_name
        content = read_beside(self.module, shipped)
        if content is not None and unseal_bytes(file_name, content) is not None:
            return shipped
        return kept_entry(file_name, lambda: self.compile(name, self.options(config, aligned, arch))).path

    def compile(self, name: str, options: tuple[str, ...]) -> bytes:
        """Returns the machine code of a kernel. RuntimeError with the log of what NVRTC refuses."""
        from cupy.cuda import nvrtc

        file = self.kernels[name].file
        program = nvrtc.createProgram(self.source(name), file, (), ())
        try:
            nvrtc.compileProgram(program, (*options, *flags_of(self.source(name))))
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
            with suspend_capture():
                kernel = cupy.RawModule(path=str(path)).get_function(name)
                kernel.max_dynamic_shared_size_bytes = config.shared
                self._functions[key] = kernel.kernel  # of this device
        return self._functions[key]

    def _read(self, file: str) -> str:
        if self.sources is not None and file in self.sources:
            return self.sources[file]
        beside = self.module.with_name(file)
        return (beside if beside.is_file() else Path(__file__).with_name(file)).read_text(encoding="utf-8")


def read_beside(module: Path, file: Path) -> bytes | None:
    """Returns what a file in a folder beside a module has in it. None where it cannot be read, and where
    somebody could have written it who could not have written the module.
    """
    try:
        known = [path.stat() for path in (module, module.parent)]
        found = [path.stat() for path in (file, file.parent)]
        if not stat.S_ISREG(found[0].st_mode) or not all(_is_as_safe(one, known) for one in found):
            return None
        return file.read_bytes()
    except OSError:
        return None


def _is_as_safe(found: os.stat_result, known: list[os.stat_result]) -> bool:
    """Returns whether everybody who may write to a file could write to one of those that are known."""
    open_to_others = [one for one in known if not one.st_mode & stat.S_ISVTX]
    groups = {one.st_gid for one in open_to_others if one.st_mode & 0o020}
    return (
        found.st_uid in {0, *(one.st_uid for one in known)}
        and (not found.st_mode & 0o020 or found.st_gid in groups)
        and (not found.st_mode & 0o002 or any(one.st_mode & 0o002 for one in open_to_others))
    )


#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


@contextmanager
def suspend_capture() -> Iterator[None]:
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


def flags_of(source: str) -> list[str]:
    """Returns what NVRTC is told besides, as lines `// nvrtc: --flag` of a source, or of its headers, say."""
    return _FLAGS.findall(source)


def inline_headers(source: str, read: Callable[[str], str]) -> str:
    """Returns a source with the headers in the place of the lines that include them, so that it is compiled
    alone.

    read: the text of a header by its name; it may include others.
    """
    lines = []
    for line in source.splitlines(keepends=True):
        if line.startswith('#include "') and (name := line.split('"')[1]).endswith(".cuh"):
            lines.append(inline_headers(read(name), read))
        else:
            lines.append(line)
    return "".join(lines)


def list_defines(config: KernelConfig, aligned: bool) -> dict[str, int]:
    """Returns what a kernel is compiled with, by name."""
    names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES", "BLOCK_D", "RAW_TILES")
    sizes = {name: int(getattr(config, name)) for name in names if hasattr(config, name)}
    if limit := getattr(config, "maxnreg", 0):
        sizes["MAXNREG"] = int(limit)
    if getattr(config, "parts", 0) > 1:
        sizes["IN_PARTS"] = 1  # however many there are
    if getattr(config, "kept", 0) > 0:
        sizes["KEEPS_DS"] = 1
    return {**sizes, "ALIGNED": int(aligned)}
