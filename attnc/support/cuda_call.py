"""CUDA kernels made ready: what is left for a call is to pack addresses."""

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from .binaries import Compiled, Program
from .call import Attention, Launch
from .configs import KernelConfig
from .devices import Gpu
from .memory import make_picker
from .pages import PageKernels
from .place import Place
from .sizes import Names, evaluate

#: What starts kernels on torch's current stream, with the address of the address of packed arguments.
Start = Callable[[int], None]
#: A launch but for the stream: what starts the kernels, and their arguments.
Packed = tuple[Start, bytes]
#: The same of arguments that stay in place: what starts the kernels, what it takes, and what keeps that.
Kept = tuple[Start, int, ctypes.c_char_p]
#: Packed arguments that a launch keeps at most, by addresses.
_MOST_KEPT = 256


@dataclass(frozen=True)
class Kernel:
    """A kernel: its name, and how many blocks it has.

    config: the kernel of a backward that it is configured as; changes: fields of that config that it has of
    its own. joins: launched where the keys of sequences are split.
    """

    name: str
    blocks: str
    _: KW_ONLY
    config: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    joins: bool = False

    def choose_config(self, config: KernelConfig) -> KernelConfig:
        """Returns the config that it is compiled and launched with."""
        own = {name: evaluate(text, {"config": config}) for name, text in self.changes.items()}
        return config._replace(**own) if own else config


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels that take the same struct of arguments, one after the other.

    addresses: tensors in the order of the struct; `splits+SIZE` is so many bytes behind the start of one.
    strides, numbers: what stands behind them, in 64 and 32 bits: `q:bmh` for stride_qb, stride_qm and
    stride_qh, `bias:0` for stride_bias_0; sizes. sizes: by name those that they take besides. rounds: how
    often they are launched, by their sizes, which may say `ROUND`; "": once.
    """

    kernels: tuple[Kernel, ...]
    addresses: str
    strides: str
    numbers: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    rounds: str = ""

    def list_places(self, place: Place) -> list[Place]:
        """Lists what each round is prepared for."""
        rounds = evaluate(self.rounds, place.names) if self.rounds else 1
        return [place._replace(names={**place.names, "ROUND": number}) for number in range(rounds)]

    @property
    def stride_names(self) -> list[str]:
        tensors = (word.split(":") for word in self.strides.split())
        return [
            f"stride_{tensor}_{axis}" if axis.isdigit() else f"stride_{tensor}{axis}"
            for tensor, axes in tensors
            for axis in axes
        ]


class Ready(NamedTuple):
    """A kernel of a launch. joins: the splits that the one before it has made."""

    name: str
    config: KernelConfig
    blocks: int
    joins: bool = False


class Arguments(NamedTuple):
    """What kernels take, but for addresses.

    positions: of the tensors whose addresses come first; matrices: those of them whose rows are copied;
    offsets: bytes that an address is behind the start of its tensor. numbers: what follows the addresses,
    packed. rows_aligned: every row of the matrices starts at a multiple of 16 bytes if the first does, so
    that kernels can copy 16 at a time.
    """

    positions: Sequence[int]
    matrices: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    numbers: bytes
    rows_aligned: bool


class CudaLaunch:
    """Kernels that take the same arguments, one after the other; all of these but addresses never change."""

    def __init__(self, program: Program, gpu: Gpu, kernels: Sequence[Ready], arguments: Arguments) -> None:
        self.program, self.gpu, self.kernels, self.arguments = program, gpu, kernels, arguments
        self.starts: dict[bool, Start] = {}
        self.kept: dict[tuple[int, ...], Kept] = {}
        self.run = self._runner()

    def _runner(self) -> Callable[[Sequence[torch.Tensor | None]], None]:
        """Returns the launch itself: a closure, whose variables are found faster than attributes."""
        read, kept = given_of(self.arguments.positions), self.kept
        pick = make_picker(read)

        def run(given: Sequence[Any]) -> None:
            addresses = tuple([x.data_ptr() for x in pick(given)])
            made = kept.get(addresses)
            if made is None:
                made = self.keep(addresses, self.pack(dict(zip(read, addresses, strict=True))))
            made[0](made[1])

        return run

    def keep(self, addresses: tuple[int, ...], made: Packed) -> Kept:
        """Keeps what was packed for the next call with these addresses, and returns it."""
        if len(self.kept) >= _MOST_KEPT:
            self.kept.clear()  # in a step of constant time, whatever other threads add
        start, packed = made
        pointer = ctypes.c_char_p(packed)  # the driver copies what it points to
        found = self.kept[addresses] = start, ctypes.addressof(pointer), pointer
        return found

    def pack(self, addresses: Mapping[int, int]) -> Packed:
        """Returns what a launch with tensors at these addresses takes, by their positions."""
        positions, matrices, _, numbers, rows_aligned = self.arguments
        found = [addresses.get(at, 0) for at in positions]
        bits = 0
        for i in matrices:
            bits |= found[i]
        aligned = bits % 16 == 0
        return self.start_of(aligned and rows_aligned), self.packed_addresses(found) + numbers

    def packed_addresses(self, found: list[int]) -> bytes:
        """Packs addresses; those of tensors that kernels enter behind their first element are moved there."""
        for i, offset in self.arguments.offsets:
            found[i] += offset if found[i] else 0
        return struct.pack(f"={len(found)}Q", *found)

    def start_of(self, aligned: bool) -> Start:
        """Returns what starts the kernels that are compiled for rows at multiples of 16 bytes, or for any."""
        start = self.starts.get(aligned)
        if start is None:
            start = self.starts[aligned] = self.starter(aligned)
        return start

    def starter(self, aligned: bool) -> Start:
        """Returns what starts the kernels on torch's current stream of the device."""
        gpu = self.gpu
        if gpu.index < 0:
            raise ValueError(f"q: expected a tensor on a CUDA device, got one on the {gpu.name}")
        from cupy.cuda import driver, runtime

        with torch.cuda.device(gpu.index):
            launches = [self.launcher(kernel, aligned) for kernel in self.kernels if kernel.blocks]

        index, context = gpu.index, driver.ctxGetCurrent

        def start(arguments: int) -> None:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    start(arguments)
                return
            if not context():
                runtime.setDevice(index)  # gives a thread that has none the device's context
            # The pointer inside torch.cuda.current_stream(), without the microseconds that the object takes.
            stream = torch._C._cuda_getCurrentRawStream(index)
            for launch in launches:
                launch(stream, arguments, 0)

        return start

    def launcher(self, kernel: Ready, aligned: bool) -> Callable[[int, int, int], None]:
        """Returns the driver's cuLaunchKernel, but for the stream and the arguments."""
        from cupy.cuda import driver

        name, config, blocks, _ = kernel
        function = self.program.function(name, config, aligned, self.gpu.index, self.gpu.arch)
        return functools.partial(
            driver.launchKernel, function.ptr, blocks, 1, 1, 32 * config.WARPS, 1, 1, config.shared
        )


@dataclass(eq=False, kw_only=True)
class CudaAttention(Attention):
    """The callable of a module whose kernels are in .cu files beside it.

    module: its path; file: what the names of those files begin with; sources: their texts, where they are
    not beside it; element: the type that they are compiled for, where their text does not say it. chunk:
    elements of 16 bytes.
    """

    module: str
    file: str
    element: str = ""
    chunk: int = 8
    sources: Mapping[str, str] | None = None
    program_type: ClassVar[type[Program]] = Program
    joins_workspaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.launch_type: type[CudaLaunch] = CudaLaunch
        compiled = tuple(self._list_compiled())
        self.program = self.program_type(self.module, compiled, self.sources, self.element)

    def made_ready(self, launches: tuple[Any, ...], place: Place) -> tuple[Launch, ...]:
        return tuple(self._launch(kernels, at) for kernels in launches for at in kernels.list_places(place))

    def functions(self, gpu: Gpu) -> dict[str, Callable[..., int]]:
        return {**super().functions(gpu), "dq_floats()": dq_floats}

    @staticmethod
    def page_kernels() -> PageKernels | None:
        try:
            from .page_kernels import TritonPages, builds_launchers
        except ImportError:  # no Triton, which CUDA kernels do not need, or one file with all that they do
            return None
        return TritonPages() if builds_launchers() else None

    def _list_compiled(self) -> list[Compiled]:
        backward = self.backward
        launches = self.launches if backward is None else (*self.launches, *backward.launches)
        found = []
        for kernel in (kernel for launch in launches for kernel in launch.kernels):
            configs = backward.configs[kernel.config] if backward and kernel.config else self.configs
            found.append(
                Compiled(kernel.name, self._file_of(kernel), tuple(map(kernel.choose_config, configs)))
            )
        return found

    def _file_of(self, kernel: Kernel) -> str:
        part = kernel.name.removeprefix(f"{self.name}_") if kernel.config else ""
        return f"{self.file}_{part}.cu" if part else f"{self.file}.cu"

    def _launch(self, launch: Kernels, place: Place) -> CudaLaunch:
        names = with_sizes(launch, place)
        return self.launch_type(
            self.program, place.gpu, ready(launch, names), self._arguments(launch, place, names)
        )

    def _arguments(
        self, launch: Kernels, place: Place, names: Names, *, before: int = 0, alignment: int = 8
    ) -> Arguments:
        """before: bytes that stand before the addresses; alignment: of the struct."""
        tensors, offsets = [], []
        for i, word in enumerate(launch.addresses.split()):
            name, _, behind = word.partition("+")
            tensors.append(name)
            start = place.behind.get(name, ("", 0))[1] + (evaluate(behind, names) if behind else 0)
            if start:
                offsets.append((i, start))
        strides, sizes = launch.stride_names, launch.numbers.split()
        padding = -(before + 8 * (len(tensors) + len(strides)) + 4 * len(sizes)) % alignment
        form = f"={len(strides)}q{len(sizes)}i{padding}x"
        numbers = struct.pack(form, *(names[word] for word in (*strides, *sizes)))
        matrices = [
            i for i, name in enumerate(tensors) if name in place.declared and place.declared[name].has_rows
        ]
        steps = {name for i in matrices for name in place.declared[tensors[i]].stride_names} & set(strides)
        rows_aligned = all(names[step] % self.chunk == 0 for step in steps)
        return Arguments(place.positions(tensors), matrices, offsets, numbers, rows_aligned)


def given_of(positions: Sequence[int]) -> list[int]:
    return sorted({at for at in positions if at >= 0})


def with_sizes(launch: Kernels, place: Place) -> dict[str, Any]:
    """Returns the names of a place and those that kernels take besides."""
    names = dict(place.names)
    for name, text in launch.sizes.items():  # each may mention those before it
        names[name] = evaluate(text, names)
    return names


def ready(launch: Kernels, names: Names) -> list[Ready]:
    """Returns the kernels that are launched."""
    kernels = []
    for kernel in launch.kernels:
        if kernel.joins and names.get("SPLITS", 1) == 1:
            continue
        config = names[f"{kernel.config}_config" if kernel.config else "config"]
        sizes = {**names, "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
        blocks = evaluate(kernel.blocks, sizes)
        kernels.append(Ready(kernel.name, kernel.choose_config(config), blocks, kernel.joins))
    return kernels


def dq_floats(config: KernelConfig, pieces: int) -> int:
    """Floats of a q tile of dq while it is summed: its rows and columns are shared among the warps, 16
    columns at least. pieces: of 16 columns in a row.
    """
    rows = config.BLOCK_M
    if config.BLOCK_M % 32 == 0 and config.WARPS % (config.BLOCK_M // 32) == 0:
        rows = 32
    sharing = config.WARPS * rows // config.BLOCK_M
    floats: int = config.BLOCK_M * sharing * (-(-pieces // sharing) * 16)
    return floats
