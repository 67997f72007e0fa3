# Copied by `attnc compile`, from attnc/support. Do not edit.
"""CUDA kernels of sm_90a made ready: tensor maps before their arguments, a counter of tiles behind the
addresses.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from .arguments import Tensor
from .binaries import Program, list_defines
from .call import Launch
from .configs import KernelConfig
from .cuda_call import (
    Arguments,
    CudaAttention,
    CudaLaunch,
    Kernels,
    Packed,
    Ready,
    given_of,
    ready,
    with_sizes,
)
from .devices import Gpu, gpu_of
from .memory import Memory, contiguous, made_apart, make_picker
from .place import Place
from .sizes import evaluate

#: Bytes of a tensor map, and the alignment of a struct that has one.
_MAP, _ALIGNMENT = 128, 64
#: Bytes behind the counters, which are what maps of empty tensors show.
_NOTHING = 16
#: CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _FLOAT32, _BFLOAT16, and _UINT8 for what is copied as it is.
_MAP_TYPES = {
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.int8: 0,
}
#: Bytes of the columns of a box, which the swizzle permutes, and what addresses and strides are multiples of.
_COLUMN_BYTES, _CHUNK = 128, 16
#: Of the GPUs that the kernels are for.
_CAPABILITY = (9, 0)
#: Tensor maps that a launch keeps of each tensor.
_MOST_MAPS = 64


@dataclass(frozen=True, kw_only=True)
class TmaKernels(Kernels):
    """Kernels whose struct of arguments begins with tensor maps. maps: by tensor the rows of a box, and the
    axis that has them, `16 along 1`, where it is not the one before columns. counts: they have the address of
    a counter behind the others. waits: each waits itself for the kernel before it.
    """

    maps: Mapping[str, str] = field(default_factory=dict)
    counts: bool = True
    waits: bool = False


class Box(NamedTuple):
    """A tensor as TMA sees it, from its inside: columns, rows, heads, batch or pages. strides: in bytes, of
    all but columns; rows: of a box; step: from a column to the next, in elements; is_empty: the tensor has no
    element, and the box is 16 bytes elsewhere.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    step: int = 1
    is_empty: bool = False

    @property
    def is_taken(self) -> bool:
        """Whether TMA takes such strides: 0, of an axis that is expanded, too."""
        return self.step == 1 and all(stride >= 0 and stride % _CHUNK == 0 for stride in self.strides)


def box_of(tensor: Tensor, memory: Memory, rows: int, along: int | None = None) -> Box:
    """Returns the box of a declared tensor; an axis that it has not, or of size 1, has any stride. One
    without features has the axes of its index, the last of them columns. along: the axis of such a one that
    has its rows, None: that before columns.

    No map has a size of 0, and kernels may copy a tile of which no row is theirs: of packed keys, where no
    sequence has any.
    """
    if 0 in memory.shape:
        columns = _NOTHING // memory.dtype.itemsize
        return Box(memory.dtype, (columns, 1, 1, 1), (_CHUNK,) * 3, rows, is_empty=True)
    if not tensor.has_rows:
        axes = [*zip(memory.shape, memory.strides, strict=True)][::-1]
        if along is not None:
            axes.insert(1, axes.pop(-1 - along))
        (columns, step), *others = [*axes, *[(1, 0)] * (4 - len(axes))]
        strides = [memory.dtype.itemsize * stride if size > 1 else _CHUNK for size, stride in others]
        sizes = [max(1, size) for size in (columns, *(size for size, _ in others))]
        return Box(memory.dtype, tuple(sizes), tuple(strides), rows, step if columns > 1 else 1)
    sizes, strides = [memory.shape[-1]], []
    for letter in ("m" if "m" in tensor.axes else "n", "h", "p" if "p" in tensor.axes else "b"):
        axis = tensor.axes.find(letter)
        size = 1 if axis < 0 else memory.shape[axis]
        sizes.append(max(1, size))
        strides.append(memory.dtype.itemsize * memory.strides[axis] if size > 1 else _CHUNK)
    return Box(memory.dtype, tuple(sizes), tuple(strides), rows)


def _rows_of(text: str, sizes: Mapping[str, int]) -> tuple[int, int | None]:
    """Returns the rows of a box, and the axis that has them, as `TmaKernels` says them."""
    rows, _, along = text.partition(" along ")
    return evaluate(rows, sizes), int(along) if along else None


def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """Returns the driver's 128 bytes; from the inside: sizes and boxes in elements, strides in bytes;
    swizzle: of 128 bytes.
    """
    place = ctypes.create_string_buffer(_MAP + 64)
    first = -ctypes.addressof(place) % 64  # they lie at a multiple of 64
    rank = len(sizes)
    failed = _encode()(
        ctypes.c_void_p(ctypes.addressof(place) + first), _MAP_TYPES[dtype], rank, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * len(strides))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*(1 for _ in box)),
        0, 3, 2, 0,  # not interleaved, swizzled by 128 bytes, as many at a time into the cache, zeros outside
    )  # fmt: skip
    if failed:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {failed} for {sizes}, {strides}, {box}")
    return place.raw[first : first + _MAP]


@functools.cache
def _encode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


#: By device and stream. Kernels leave them as they find them, so that one is enough where they run one after
#: the other.
_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}


#: Numbers of a counter: two, aligned to 16 bytes, and as many bytes more; then marks of the places that
#: blocks take (`sm90_places.cuh`), one for each multiprocessor of any device.
MARKS_AT, _MARKS = (16 + _NOTHING) // 4, 256
_COUNTED = MARKS_AT + _MARKS


def counter_of(index: int) -> torch.Tensor:
    """Zeros on the device, for one launch at a time: how many tiles are taken, and how many blocks have
    ended; from the fifth on what nobody writes, and from `MARKS_AT` on which places are taken.
    """
    if index < 0:
        return torch.zeros(_COUNTED, dtype=torch.int32)
    if torch._C._cuda_isCurrentStreamCapturing():  # a graph may run beside anything
        return torch.zeros(_COUNTED, dtype=torch.int32, device=index)
    key = index, torch._C._cuda_getCurrentRawStream(index)
    counter = _COUNTERS.get(key)
    if counter is None:
        zeros = functools.partial(torch.zeros, _COUNTED, dtype=torch.int32, device=index)
        counter = _COUNTERS[key] = made_apart(zeros)
    return counter


def copied(x: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to memory as TMA takes it, as `padded` says."""
    memory = padded(x.shape, x.dtype)
    return torch.empty_strided(memory.shape, memory.strides, dtype=x.dtype, device=x.device).copy_(x)


def padded(shape: Sequence[int], dtype: torch.dtype) -> Memory:
    """Contiguous, but for what is left of the last 16 bytes of a row."""
    whole = -(-max(shape[-1], 1) * dtype.itemsize // _CHUNK) * _CHUNK // dtype.itemsize
    return Memory(tuple(shape), contiguous((*shape[:-1], whole), dtype).strides, dtype)


def hopper_of(index: int) -> Gpu:
    """`gpu_of`. ValueError for a GPU of another compute capability than 9.0."""
    gpu = gpu_of(index)
    if index >= 0 and gpu.capability != _CAPABILITY:
        major, minor = gpu.capability
        raise ValueError(
            f"q: this kernel is for GPUs of compute capability 9.0, and {gpu.name} has {major}.{minor}"
        )
    return gpu


class HopperProgram(Program):
    """Kernels for sm_90a, and those of sm_80 that are compiled for it too."""

    def options(self, config: KernelConfig, aligned: bool, arch: str) -> tuple[str, ...]:
        if getattr(config, "Q_TILES", 0):
            defines = {name: x for name, x in config._asdict().items() if name.isupper() and name != "WARPS"}
        else:
            defines = list_defines(config, aligned)
        # lambdas of many types are no host code
        flags = ("-arch=sm_90a", "-std=c++17", "-default-device")
        return (*flags, *self.list_flags(defines))


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of a bool."""

    _fields_: ClassVar = [
        ("id", ctypes.c_int),
        ("_pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_char * 60),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_SERIALIZED = 6


def launcher_behind(function: int, blocks: int, threads: int, shared: int) -> Callable[[int, int, int], None]:
    """cuLaunchKernelEx of a kernel whose blocks may start while the kernel before it ends, and wait for it
    themselves (programmatic dependent launch); but for the stream and the arguments.
    """
    launch = ctypes.PyDLL(
        "libcuda.so.1"
    ).cuLaunchKernelEx  # without argtypes, which every call would go through
    attribute, code, pointer = (
        LaunchAttribute(id=_SERIALIZED, value=1),
        ctypes.c_void_p(function),
        ctypes.c_void_p,
    )
    configs: dict[int, Any] = {}  # by stream: a thread does not change that of another

    def start(stream: int, arguments: int, extra: int) -> None:
        config = configs.get(stream)
        if config is None:
            sizes = ((ctypes.c_uint * 3)(n, 1, 1) for n in (blocks, threads))
            made = LaunchConfig(*sizes, shared, stream, ctypes.pointer(attribute), 1)
            config = configs[stream] = ctypes.byref(made)
        failed = launch(config, code, pointer(arguments), pointer(extra))
        if failed:
            raise RuntimeError(f"cuLaunchKernelEx: error {failed}")

    return start


class Tma(NamedTuple):
    """What TMA copies in a launch: boxes by tensor. The rest is for a launch on copies of what it cannot
    take.
    """

    boxes: Mapping[str, Box]
    call: "HopperAttention"
    kernels: TmaKernels
    place: Place


class HopperLaunch(CudaLaunch):
    """A launch whose arguments begin with tensor maps, if TMA copies something.

    What it cannot take, for its address or its strides, is copied first, and results are copied back.
    """

    def __init__(
        self,
        program: Program,
        gpu: Gpu,
        kernels: Sequence[Ready],
        arguments: Arguments,
        tma: Tma | None = None,
    ) -> None:
        self.tma = tma
        self.maps: dict[int, dict[int, bytes]] = {}
        self.mapped: Sequence[int] = ()
        self.on_copies: Sequence[CudaLaunch] = ()
        #: Rounds that come after this one, which run on its copies; whether this is one of them.
        self.rest: Sequence[HopperLaunch] = ()
        self.is_later = False
        super().__init__(program, gpu, kernels, arguments)

    def _runner(self) -> Callable[[Sequence[torch.Tensor | None]], None]:
        if self.tma is None:
            return super()._runner()
        boxes, call, kernels, place = self.tma
        positions = self.arguments.positions
        self.mapped = place.positions(boxes)
        read, kept, index = given_of([*self.mapped, *positions]), self.kept, self.gpu.index
        pick, counter, counts = make_picker(read), call.counter, kernels.counts
        # a result that TMA stores is among the addresses too
        checked = {*self.mapped, *(positions[i] for i in self.arguments.matrices)} - {-1}
        copied = [i for i, at in enumerate(read) if at in checked]
        takes = self.arguments.rows_aligned and all(box.is_taken for box in boxes.values())

        def run(given: Sequence[Any]) -> None:
            found = [x.data_ptr() for x in pick(given)]
            if counts:
                tiles = counter(index)  # which lives until the kernels are launched
                found.append(tiles.data_ptr())
            addresses = tuple(found)
            made = kept.get(addresses)
            if made is None:
                if not takes or any(found[i] % _CHUNK for i in copied):
                    if not self.is_later:
                        self.run_on_copies(given)
                    return
                by_position = dict(zip(read, found, strict=False))
                made = self.keep(addresses, self.packed_behind_maps(by_position, found[len(read) :]))
            made[0](made[1])

        return run

    def packed_behind_maps(self, addresses: Mapping[int, int], counter: Sequence[int]) -> Packed:
        """`packed`, behind tensor maps. counter: the address of one, if the kernels take it."""
        assert self.tma is not None
        positions, numbers = self.arguments.positions, self.arguments.numbers
        boxes = enumerate(zip(self.mapped, self.tma.boxes.values(), strict=True))
        empty = counter[0] + 16 if counter else 0
        maps = [self.map(i, empty if box.is_empty else addresses.get(at, 0), box) for i, (at, box) in boxes]
        found = [*(addresses.get(at, 0) for at in positions), *counter]
        return self.start_of(True), b"".join((*maps, self.packed_addresses(found), numbers))

    def launcher(self, kernel: Ready, aligned: bool) -> Callable[[int, int, int], None]:
        if self.tma is None or not self.tma.kernels.waits:
            return super().launcher(kernel, aligned)
        name, config, blocks, joins = kernel
        shared = config.shared
        if not joins:  # what a function may ask for belongs to all its launches
            config = config._replace(shared=max(shared, self.gpu.shared_in_all // 2))
        function = self.program.function(name, config, aligned, self.gpu.index, self.gpu.arch)
        if blocks <= self.gpu.multiprocessors:
            # A multiprocessor for each: some start while blocks of the kernel before still run elsewhere, and
            # two would share one. So each asks for half of its shared memory, beside what the system takes.
            shared = config.shared
        return launcher_behind(function.ptr, blocks, 32 * config.WARPS, shared)

    def map(self, i: int, address: int, box: Box) -> bytes:
        """Returns the map of the tensor with this number where it begins there. The last are kept."""
        assert self.tma is not None
        made = self.maps.setdefault(i, {})
        found = made.get(address)
        if found is None:
            size = (_COLUMN_BYTES // box.dtype.itemsize, box.rows, 1, 1)
            found = self.tma.call.tensor_map(address or 16, box.dtype, box.sizes, box.strides, size, 128)
            if len(made) >= _MOST_MAPS:
                made.pop(list(made)[0], None)  # noqa: RUF015  # other threads add to them
            made[address] = found
        return found

    def run_on_copies(self, given: Sequence[torch.Tensor | None]) -> None:
        """Launches with copies of all matrices, and so all rounds."""
        assert self.tma is not None
        boxes, call, kernels, place = self.tma
        matrices = [name for name, tensor in place.declared.items() if tensor.has_rows or name in boxes]
        matrices = [name for name in matrices if name in place.memories]
        if not self.on_copies:
            plain = {name: padded(*place.memories[name][::2]) for name in matrices}
            places = (launch.tma.place for launch in (self, *self.rest) if launch.tma is not None)
            self.on_copies = [
                call.tma_launch(kernels, at.with_memories({**at.memories, **plain})) for at in places
            ]
        tensors: list[Any] = list(given)
        found = list(zip(matrices, place.positions(matrices), strict=True))
        for name, at in found:  # callers who know that only addresses matter may give other views
            shape, strides, _ = place.memories[name]
            tensors[at] = tensors[at].as_strided(shape, strides)
        seen = list(tensors)
        for _, at in found:
            tensors[at] = call.copied(tensors[at])
        for launch in self.on_copies:
            launch.run(tensors)
        for name, at in found:
            if name in place.results:
                seen[at].copy_(tensors[at])


@dataclass(eq=False, kw_only=True)
class HopperAttention(CudaAttention):
    """The callable of a module whose kernels are for sm_90a."""

    program_type: ClassVar[type[Program]] = HopperProgram

    @staticmethod
    def serves(gpu: Gpu) -> bool:
        return gpu.capability == _CAPABILITY

    def __post_init__(self) -> None:
        super().__post_init__()
        self.launch_type: type[HopperLaunch] = HopperLaunch
        self.gpu_of = hopper_of
        self.tensor_map, self.counter, self.copied = tensor_map, counter_of, copied

    def made_ready(self, launches: tuple[Any, ...], place: Place) -> tuple[Launch, ...]:
        made: list[Launch] = []
        for kernels in launches:
            first, *rest = rounds = [self._launch(kernels, at) for at in kernels.list_places(place)]
            if isinstance(first, HopperLaunch):
                first.rest = [launch for launch in rest if isinstance(launch, HopperLaunch)]
                for launch in first.rest:
                    launch.is_later = True
            made += rounds
        return tuple(made)

    def _launch(self, launch: Kernels, place: Place) -> CudaLaunch:
        if not isinstance(launch, TmaKernels):
            return super()._launch(launch, place)
        return self.tma_launch(launch, place)

    def tma_launch(self, launch: TmaKernels, place: Place) -> HopperLaunch:
        """Returns a launch whose arguments begin with tensor maps."""
        names = with_sizes(launch, place)
        arguments = self._arguments(
            launch, place, names, before=_MAP * len(launch.maps) + 8 * launch.counts, alignment=_ALIGNMENT
        )
        boxes = {
            name: box_of(place.declared[name], place.memories[name], *_rows_of(text, names))
            for name, text in launch.maps.items()
        }
        tma = Tma(boxes, self, launch, place)
        return self.launch_type(self.program, place.gpu, ready(launch, names), arguments, tma)
