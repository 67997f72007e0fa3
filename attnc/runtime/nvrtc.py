"""CUDA C++ to machine code with no GPU and no toolkit: NVRTC, as it comes in NVIDIA's wheel.

Only the shared library is needed (`pip install nvidia-cuda-nvrtc`): generated kernels include no header.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attnc.support.binaries import flags_of
from attnc.support.cache import kept_entry

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ADVISORY = re.compile(r"\(C75\d\d\)|warning\s*(#[\w-]+)?:")


class CompilationError(Exception):
    """NVRTC refused a source; the message is its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """Machine code for one architecture and what ptxas said of it.

    registers: of a thread; stack, spills: bytes of local memory, and those stored for want of registers;
    warnings: lines of the log that say that something was serialised, ignored or suspicious."""

    image: bytes
    log: str

    @property
    def registers(self) -> int:
        return max((int(n) for n in _REGISTERS.findall(self.log)), default=0)

    @property
    def stack(self) -> int:
        return max((int(found[0]) for found in _SPILLS.findall(self.log)), default=0)

    @property
    def spills(self) -> int:
        return max((int(found[1]) for found in _SPILLS.findall(self.log)), default=0)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(line for line in self.log.splitlines() if _ADVISORY.search(line))


def compile_cubin(source: str, options: Sequence[str]) -> Cubin:
    """Returns machine code of a header-free source, from the cache when it has been compiled before.

    options: as the generated module gives them, e.g. ("-arch=sm_90", "-std=c++17", "-DBLOCK_M=64"). Raises
    CompilationError, and FileNotFoundError when NVRTC is not installed.
    """
    options = [*options, "--ptxas-options=-v"]
    key = hashlib.sha256("\0".join([nvrtc_version(), *options, source]).encode()).hexdigest()
    kept = kept_entry(f"{key}.nvrtc", lambda: _pack(_compile(source, options))).payload
    size, _, rest = kept.partition(b"\n")
    log, image = rest[: int(size)], rest[int(size) :]
    return Cubin(image=image, log=log.decode())


def _pack(cubin: Cubin) -> bytes:
    log = cubin.log.encode()
    return b"%d\n%s%s" % (len(log), log, cubin.image)


def compile_ptx(source: str, options: Sequence[str]) -> str:
    """Compiles a source to optimized PTX, without ptxas: in about half the time of `compile_cubin`, with no
    word of registers. Raises as it does.
    """
    options = [option.replace("-arch=sm_", "-arch=compute_") for option in options]
    library = _library()
    with _compile_program(library, source, options) as (program, _):
        return _text(_bytes(library.nvrtcGetPTXSize, library.nvrtcGetPTX, program))


def digest_ptx(source: str, options: Sequence[str]) -> str:
    """Returns SHA-256 of a source's PTX, from the cache when it has been compiled before. Raises as
    `compile_ptx` does.
    """
    key = hashlib.sha256("\0".join([nvrtc_version(), *options, source]).encode()).hexdigest()

    def make() -> bytes:
        return hashlib.sha256(compile_ptx(source, options).encode()).hexdigest().encode()

    return kept_entry(f"{key}.ptx", make).payload.decode()


def nvrtc_version() -> str:
    """Returns the version, "13.0". Raises FileNotFoundError when NVRTC is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def _library() -> ctypes.CDLL:
    for path in _candidates():
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))  # NVRTC opens it by name, which finds what is loaded already
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise FileNotFoundError("libnvrtc was not found: pip install nvidia-cuda-nvrtc")


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from sorted(map(str, Path(folder).glob("*/lib/libnvrtc.so.*")))
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found


def _compile(source: str, options: list[str]) -> Cubin:
    library = _library()
    with _compile_program(library, source, options) as (program, log):
        return Cubin(image=_bytes(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log=log)


@contextmanager
def _compile_program(
    library: ctypes.CDLL, source: str, options: list[str]
) -> Iterator[tuple[ctypes.c_void_p, str]]:
    program = ctypes.c_void_p()
    name = b"kernel.cu"
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None))
    try:
        options = [*options, *flags_of(source)]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), array)
        log = _text(_bytes(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program))
        if status:
            raise CompilationError(log)
        yield program, log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(found: bytes) -> str:
    return found.rstrip(b"\0").decode(errors="replace")


def _bytes(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        _library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(_library().nvrtcGetErrorString(status).decode())
