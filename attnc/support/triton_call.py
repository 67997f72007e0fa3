"""Calls of modules of Triton kernels, made ready."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from .arguments import Tensor
from .call import Attention, Launch
from .devices import Gpu
from .memory import Memory
from .page_kernels import TritonPages
from .pages import PageKernels
from .place import Place
from .sizes import as_tuple, evaluate, next_power_of_2
from .triton_launch import Box, TritonLaunch
from .triton_launch import on_device as on_device  # for projections, which import it from here

#: Constants of kernels by their parameters' names, from the sizes and the config of a launch.
_CONSTANTS: dict[str, Callable[[Mapping[str, Any], Gpu], object]] = {
    "BLOCK_M": lambda names, gpu: names["config"].BLOCK_M,
    "BLOCK_N": lambda names, gpu: names["config"].BLOCK_N,
    "BLOCK_S": lambda names, gpu: next_power_of_2(names["SPLITS"]),
    "EARLY_DP": lambda names, gpu: names["config"].early_dp,
    "SPLIT_SIZE": lambda names, gpu: names["config"].split_size,
    "SPLIT": lambda names, gpu: names["SPLITS"] > 1,
    "PDL": lambda names, gpu: gpu.capability >= (9, 0),
}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A launch of a Triton kernel, whose parameters are the tensors, strides and sizes by name, and
    constants.

    grid: programs along up to three axes. tiles: tensors whose tiles it loads or stores, by descriptors
    where the kernel can take them (TMA); pointers: the others. config: the kernel of a backward that it is
    configured as. sizes: by name those that it takes besides; warps: where no config says. joins: launched
    where the keys of sequences are split. contracts: whether the compiler may round a product and a sum once.
    rounds: how many times it is launched, in turn with its neighbours of as many rounds.
    """

    function: Any
    grid: str
    tiles: str = ""
    pointers: str = ""
    config: str = ""
    sizes: Mapping[str, str] = field(default_factory=dict)
    warps: int = 0
    joins: bool = False
    contracts: bool = True
    rounds: str = "1"


@dataclass(eq=False, kw_only=True)
class TritonAttention(Attention):
    """The callable of a module of Triton kernels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.launch_type = TritonLaunch

    @staticmethod
    def page_kernels() -> PageKernels | None:
        return TritonPages()

    def made_ready(self, launches: tuple[Any, ...], place: Place) -> tuple[Launch, ...]:
        splits = place.names.get("SPLITS", 1)
        kernels = [kernel for kernel in launches if splits > 1 or not kernel.joins]
        ready: list[Launch] = []
        for rounds, neighbours in groupby(kernels, key=lambda kernel: kernel.rounds):
            ready += [self._launch(kernel, place) for kernel in neighbours] * evaluate(rounds, place.names)
        return tuple(ready)

    def _launch(self, kernel: Kernel, place: Place) -> TritonLaunch:
        names = dict(place.names)
        config = names["config"] = names[f"{kernel.config}_config" if kernel.config else "config"]
        names |= {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
        names |= {name: evaluate(text, names) for name, text in kernel.sizes.items()}
        tiles = kernel.tiles.split()
        tensors = [*tiles, *kernel.pointers.split()]
        parameters: list[str] = kernel.function.arg_names[len(tensors) :]
        boxes = None
        if "TMA" in parameters:
            boxes = _boxes(
                [(place.declared[name], place.memories[name]) for name in tiles], config, place.gpu
            )
        constants = {name: _CONSTANTS[name](names, place.gpu) for name in parameters if name in _CONSTANTS}
        options: dict[str, object] = {"num_warps": kernel.warps}
        if not kernel.warps:
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            if getattr(config, "maxnreg", None) and kernel.config:
                options["maxnreg"] = config.maxnreg
        if not kernel.contracts:
            options["enable_fp_fusion"] = False
        if constants.get("PDL"):
            options["launch_pdl"] = True
        return self.launch_type(
            kernel.function,
            as_tuple(evaluate(kernel.grid, names)),
            place.positions(tensors),
            [names[name] for name in parameters if name not in _CONSTANTS and name != "TMA"],
            constants,
            place.device,
            boxes,
            options,
        )


def _boxes(tensors: Sequence[tuple[Tensor, Memory]], config: Any, gpu: Gpu) -> tuple[Box, ...]:
    """Shape, strides and tile of every tensor, if the copy engine can move such tiles of all of them.

    That takes capability 9, rows at multiples of 16 bytes, and nothing empty or broadcast. Matrices are
    moved as [B, H, rows, D], rows of numbers as [B * H, rows].
    """
    if gpu.index >= 0 and gpu.capability[0] < 9:
        return ()
    boxes = []
    for tensor, memory in tensors:
        if 0 in memory.shape or any(
            step <= 0 or step * memory.dtype.itemsize % 16 for step in memory.strides[:-1]
        ):
            return ()
        if not tensor.has_rows:
            *leading, rows = memory.shape
            heads = 1
            for size in leading:
                heads *= size
            boxes.append(([heads, rows], [memory.strides[-2], 1], [1, config.BLOCK_M]))
            continue
        letter = "m" if "m" in tensor.axes else "n"
        axes = [*(tensor.axes.index(axis) for axis in ("b", "h", letter)), len(tensor.axes)]
        tile = [
            *(1, 1, config.BLOCK_M if letter == "m" else config.BLOCK_N),
            max(16, next_power_of_2(memory.shape[-1])),
        ]
        boxes.append(([memory.shape[a] for a in axes], [memory.strides[a] for a in axes], tile))
    return tuple(boxes)
