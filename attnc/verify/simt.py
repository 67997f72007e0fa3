"""Runs generated CUDA kernels on the CPU, thread by thread: `templates/cuda/simt.h` stands in for the GPU,
`templates/sm90/simt.h` for a Hopper GPU.

The `.cu` text is compiled as it is by g++, and the Python module beside it is used as it is; only its
launch is replaced. The machine that stands in for a GPU is a library of its own, which all kernels share, and
is optimised whatever `ATTNC_SIMT_FLAGS` says of kernels.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnc.resources import resource
from attnc.support.cache import cache_folder, kept_entry, own_folder

_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\w+(?:, (?P<resident>\w+))?\)|BOUNDS)'
    r"(?:\s+__cluster_dims__\((?P<cluster>\w+), 1, 1\))?\s+(?P<name>\w+)\("
)
_DEFINE = re.compile(r"-D(\w+)=(\w+)")
#: Bytes for stacks and state of a launch, at most.
_MEMORY = 1 << 30
_held: list[mmap.mmap] = []
#: Bytes of the cache that a CPU is said to have.
_CACHE = 1 << 18
_ARGUMENTS = """
static const Args* simt_args;
"""
_ENTRY = """
static void simt_kernel_%(kernel)s() { %(kernel)s(*simt_args); }
extern "C" __attribute__((visibility("default")))
const char* simt_run_%(kernel)s(
    const Args* args, int blocks, int threads, int bytes, unsigned long long seed, char* memory)
{
    simt_args = args;
    return simt::launch(
        simt_kernel_%(kernel)s, blocks, threads, bytes, seed, memory, %(resident)s%(cluster)s);
}
"""


class SimtFault(Exception):
    """A kernel did on the CPU what is undefined on a GPU: diverged at a barrier, left its shared memory,
    ...
    """


def available() -> bool:
    """Returns whether there is a g++."""
    return shutil.which("g++") is not None


def launch(
    source: str,
    defines: Mapping[str, int | str],
    args: bytes | ctypes.c_void_p,
    *,
    blocks: int,
    threads: int,
    shared: int,
    seed: int,
    kernel: str = "",
    folder: str = "cuda",
) -> None:
    """Runs a kernel (by default the first) over packed arguments, or those at an address, which point into
    CPU memory. Raises SimtFault.

    folder: of the templates, whose `simt.h` the source includes.
    """
    library = _compile(source, tuple(sorted(defines.items())), folder)
    run = getattr(library, f"simt_run_{kernel or _kernels(source)[0]['kernel']}")
    run.restype = ctypes.c_char_p
    problem = run(args, blocks, threads, shared, ctypes.c_uint64(seed), ctypes.c_void_p(_memory()))
    if problem:
        raise SimtFault(problem.decode())


def run_on_cpu(generated: ModuleType) -> None:
    """Makes the callables of a generated CUDA module, or of the package with all its variants, take tensors
    on the CPU, gradients included.

    For trying and debugging: it is slow. Raises ValueError for anything but such a module, RuntimeError
    without g++; a call that a GPU would not survive raises SimtFault.
    """
    modules = [part for part in (generated, *vars(generated).values()) if _is_cuda(part)]
    if not modules:
        raise ValueError(f"{generated.__name__} is not a CUDA module that attnc generated")
    if not available():
        raise RuntimeError("running CUDA kernels on the CPU needs g++")
    for module in modules:
        attach(module)


def _is_cuda(part: Any) -> bool:
    # not hasattr: namespaces of torch have every attribute that they are asked for
    return isinstance(part, ModuleType) and hasattr(vars(part).get("CALL"), "program")


def attach(module: ModuleType) -> None:
    """Makes a generated module launch on the CPU, every time with the warps in another order."""
    call: Any = vars(module)["CALL"]
    of_gpu = call.gpu_of
    # a cache so small that small cases have sections of heads too
    call.gpu_of = lambda index: of_gpu(index)._replace(l2=_CACHE)
    texts = {name: call.program.source(name) for name in call.program.kernels}
    folders = {name: "sm90" if "mbarrier_wait(" in text else "cuda" for name, text in texts.items()}
    counter = None
    if hasattr(call, "tensor_map"):
        call.tensor_map = _tensor_map
        counter = call.counter = KeptCounter(call.counter(-1))
    # scattered: the last bit turns the order of blocks around, and a call makes as many launches as another
    seeds = (n * 0x9E3779B97F4A7C15 >> 9 & (1 << 48) - 1 for n in count())

    # equal files are one module, which may have been made to launch here before
    launch_type: Any = getattr(call, "gpu_launch_type", call.launch_type)

    class SimulatedLaunch(launch_type):  # type: ignore[misc]  # of the module's support package
        def starter(self, aligned: bool) -> Callable[[int], None]:
            def start(arguments: int) -> None:
                args = ctypes.c_void_p.from_address(arguments)
                for name, config, blocks, _ in self.kernels:
                    if blocks == 0:
                        continue
                    options = self.program.options(config, aligned, self.gpu.arch)
                    with nullcontext() if counter is None else counter.launched():
                        launch(
                            texts[name],
                            dict(_DEFINE.findall(" ".join(options))),
                            args,
                            blocks=blocks,
                            threads=32 * config.WARPS,
                            shared=config.shared,
                            seed=next(seeds),
                            kernel=name,
                            folder=folders[name],
                        )

            return start

    call.gpu_launch_type, call.launch_type = launch_type, SimulatedLaunch
    call.forget()


class KeptCounter:
    """The numbers by which blocks of a launch share work out, the same for all launches of a module, as on a
    GPU: each has to leave the zeros that the next one begins with.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def __call__(self, index: int) -> torch.Tensor:
        return self.numbers

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Raises SimtFault where a launch within leaves other numbers."""
        try:
            yield
            if self.numbers.any():
                raise SimtFault("a launch leaves a counter that is not 0, with which the next one begins")
        finally:
            self.numbers.zero_()


def _tensor_map(pointer: int, dtype: torch.dtype, *layout: Any) -> bytes:
    return tensor_map(pointer, dtype.itemsize, *layout)


@cache
def _memory() -> int:
    """Returns the address of memory for the stacks and the state of a launch: one for all kernels, as they
    run one at a time, and most of it is never touched.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    _held.append(mmap.mmap(-1, _MEMORY, flags=flags))
    return ctypes.addressof(ctypes.c_char.from_buffer(_held[0]))


def _kernels(source: str) -> list[dict[str, str]]:
    """Returns the name of every kernel, and as arguments of `simt::launch` how many of its blocks a
    multiprocessor holds, and how many a cluster has, where it says so.
    """
    found = [match.groupdict() for match in _KERNEL.finditer(source)]
    return [
        {
            "kernel": kernel["name"],
            "resident": kernel["resident"] or "1",
            "cluster": f", {kernel['cluster']}" if kernel["cluster"] else "",
        }
        for kernel in found
    ]


#: What looks at an address and then accesses several numbers there at once, which a GPU does at multiples of
#: their bytes alone: g++ tests every address in kernels with it, which takes a third longer to compile.
_LOOKS = re.compile(r"\b(load_columns|store_columns|load_scales|by_chunks)\b")


@cache
def _compile(source: str, defines: tuple[tuple[str, int | str], ...], folder: str) -> ctypes.CDLL:
    found = _kernels(source)
    if not found:
        raise ValueError("the source has no kernel")
    text = "".join([source, _ARGUMENTS, *(_ENTRY % kernel for kernel in found)])
    flags = [*_own_flags(), *(f"-D{name}={value}" for name, value in defines)]
    flags += ["-fsanitize=alignment"] if _LOOKS.search(source) else []
    return _load(text, folder, flags, (_machine(folder),))


@cache
def _machine(folder: str) -> Path:
    """Returns the library of what stands in for a GPU, which stays loaded: kernels find it by name."""
    flags = [*_own_flags(), "-O3", "-fno-semantic-interposition", "-fno-strict-aliasing"]
    return Path(_load('#include "simt_machine.h"\n', folder, flags)._name)


def _load(text: str, folder: str, flags: list[str], libraries: Sequence[Path] = ()) -> ctypes.CDLL:
    headers = [
        path.read_text(encoding="utf-8")
        for part in sorted({"cuda", folder})
        for path in sorted(resource("templates", part).glob("*.h"))
    ]
    content = "\0".join([text, *headers, *flags, *(library.name for library in libraries)])
    name = f"{hashlib.sha256(content.encode()).hexdigest()}.so"
    # The library of a kernel has C's from the machine's, and to look into them takes half the time to link.
    flags = [*flags, f"-Wl,-soname,{name}", *(map(str, libraries) if libraries else ("-lm", "-lc"))]
    try:
        library = kept_entry(name, lambda: _build(text, resource("templates", folder), flags))
    except OSError as failure:  # writing names no file
        failure.filename = failure.filename or str(cache_folder())
        raise
    return ctypes.CDLL(str(library.path))


def _own_flags() -> list[str]:
    return [*_fill_flags(), *shlex.split(os.environ.get("ATTNC_SIMT_FLAGS", ""))]


@cache
def _fill_flags() -> tuple[str, ...]:
    """Returns the flags with which g++ fills local variables that nothing has set with numbers far from any:
    the registers of a GPU hold whatever was there before. None before g++ 12.
    """
    flag = "-ftrivial-auto-var-init=pattern"
    command = ("g++", flag, "-x", "c++", "-fsyntax-only", os.devnull)
    return () if subprocess.run(command, capture_output=True, check=False).returncode else (flag,)


def _build(text: str, include: Path, flags: list[str]) -> bytes:
    command = [
        *(
            "g++",
            "-x",
            "c++",
            "-",
            "-x",
            "none",  # libraries among the flags
            "-std=c++17",
            "-nostdinc++",  # C++'s headers take as long as a kernel, and C's have all that is used
            *("-U_GNU_SOURCE", "-D_DEFAULT_SOURCE"),  # half of C's headers, in half the time
            "-nodefaultlibs",  # nor is its library used, which takes most of the time to link
            "-Og",  # half of -O1's time; small cases take less than that to run
            "-shared",
            "-fPIC",
            "-DATTNC_SHIM",
        ),
        *(
            "-fvisibility=hidden",
            "-U_FORTIFY_SOURCE",
            "-Wno-unknown-pragmas",
            "-Wno-attributes",
            "-Wno-psabi",
            f"-I{include}",
        ),
        *flags,
    ]
    with tempfile.TemporaryDirectory(prefix="build-", dir=own_folder()) as folder:
        library = Path(folder, "kernel.so")
        done = subprocess.run(
            [*command, "-lgcc", "-o", str(library)],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            cwd=include,  # where g++ looks for headers of a text without a file before it looks anywhere else
            env={**os.environ, "TMPDIR": folder, "LC_ALL": "C"},
        )
        if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        if done.returncode:
            raise ValueError(f"g++ refused a generated kernel:\n{done.stderr}")
        return library.read_bytes()


#: Bytes that a swizzle permutes as one row; 0: none.
SPANS = (0, 32, 64, 128)


def tensor_map(
    pointer: int,
    element_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """Returns the 128 bytes of `simt::Map` in `templates/sm90/simt_state.h`.

    sizes, box: elements, innermost first; strides: bytes, of all dimensions but the innermost; swizzle: bytes
    of its span. Raises ValueError where the driver's function would refuse (CUDA driver API,
    cuTensorMapEncodeTiled).
    """
    rank = len(sizes)
    row = box[0] * element_bytes
    refused = {
        "1 to 5 dimensions": not 1 <= rank <= 5 or len(box) != rank or len(strides) != rank - 1,
        "an address that is a multiple of 16": pointer % 16 != 0 or pointer == 0,
        "sizes from 1 to 2^32": any(not 1 <= size <= 1 << 32 for size in sizes),
        "strides that are multiples of 16 below 2^40": any(s % 16 or not 0 <= s < 1 << 40 for s in strides),
        "boxes from 1 to 256": any(not 1 <= edge <= 256 for edge in box),
        "rows of a box that are multiples of 16 bytes": row % 16 != 0,
        "a swizzle of 0, 32, 64 or 128 bytes": swizzle not in SPANS,
        "rows of a box within the swizzle": swizzle > 0 and row > swizzle,
    }
    if wrong := [rule for rule, broken in refused.items() if broken]:
        raise ValueError(f"a tensor map needs {wrong[0]}")

    def five(values: Sequence[int], count: int = 5) -> list[int]:
        return [*values, *[1] * (count - len(values))]

    packed = struct.pack(
        "=Q2I5Q4Q5II",
        *(pointer, rank, element_bytes),
        *five(sizes),
        *five(strides, 4),
        *five(box),
        swizzle,
    )
    return packed.ljust(128, b"\0")
