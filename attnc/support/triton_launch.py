"""A Triton kernel made ready: from the second time on a launch takes less time than one through Triton."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .memory import make_picker

#: Shape, strides and tile of a tensor that the copy engine moves.
Box = tuple[list[int], list[int], list[int]]
#: What starts a kernel: on a stream, with arguments.
FastStart = Callable[[int, Sequence[Any]], None]
#: Tensor maps that a launch keeps of each tensor.
_MOST_MAPS = 64


class TritonLaunch:
    """kernel[grid](*tensors, *numbers, **constants), from the second time on without Triton's search for
    the binary.

    Triton compiles for the numbers and for the alignment of the tensors, and looks both up at every launch,
    which takes longer than the launch itself. Here the numbers never change, and the binary is kept for
    aligned tensors. The first tensors are passed as descriptors of their boxes, where there are any and all
    are aligned; one made for an address serves again, since nothing else in it could change.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        positions: Sequence[int],
        numbers: Sequence[int],
        constants: Mapping[str, object],
        device: torch.device,
        boxes: tuple[Box, ...] | None,
        options: Mapping[str, object],
    ) -> None:
        self.kernel, self.grid, self.numbers = kernel, grid, numbers
        self.pick = make_picker(positions)
        self.device, self.index, self.options = device, device.index, options
        self.has_boxes = boxes is not None  # whether the kernel can take descriptors, if not of these tensors
        self.boxes: tuple[Box, ...] = boxes or ()
        self.constants = constants
        self.binary: Any = None
        #: What starts the kernel on aligned tensors, once it is compiled.
        self.starts: list[FastStart] = []
        self.run = self._runner()

    def _runner(self) -> Callable[[Sequence[torch.Tensor | None]], None]:
        """Returns the launch itself: a closure, whose variables are found faster than attributes."""
        pick, index, starts, count = self.pick, self.index, self.starts, len(self.boxes)
        maps: list[dict[int, list[Any]]] = [{} for _ in self.boxes]
        trailing = (
            *self.numbers,
            *self.constants.values(),
            *([bool(self.boxes)] if self.has_boxes else []),
        )

        def run(given: Sequence[torch.Tensor | None]) -> None:
            tensors = pick(given)
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            bits = 0
            for address in addresses:
                bits |= address
            if bits % 16 or not starts or torch._C._cuda_getDevice() != index:
                self.launch(tensors, addresses, bits % 16 == 0)
                return
            if not count:
                starts[0](torch._C._cuda_getCurrentRawStream(index), (*addresses, *trailing))
                return
            arguments: list[Any] = []
            for i, made in enumerate(maps):
                arguments += made.get(addresses[i]) or self.map(made, i, addresses[i], tensors[i])
            arguments += addresses[count:]
            arguments += trailing
            starts[0](torch._C._cuda_getCurrentRawStream(index), arguments)

        return run

    def launch(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int], aligned: bool) -> None:
        """Launches through Triton, on the device of the tensors."""
        with self.on_device():
            tma = bool(self.boxes) and all(address % 16 == 0 for address in addresses[: len(self.boxes)])
            if tma:
                described = map(TensorDescriptor, tensors, *zip(*self.boxes, strict=True))
                tensors = (*described, *tensors[len(self.boxes) :])
            constants = {**self.constants, "TMA": tma} if self.has_boxes else self.constants
            binary = in_context(self.kernel[self.grid], *tensors, *self.numbers, **constants, **self.options)
        if aligned and binary is not None:
            self.binary, start = binary, self.made_fast(binary)
            self.starts[:] = [] if start is None else [start]

    def map(self, made: dict[int, list[Any]], i: int, address: int, x: torch.Tensor | None) -> list[Any]:
        """Returns what Triton makes of tensor i's descriptor: the copy engine's map, sizes and strides. The
        last are kept in `made`.
        """
        from triton.backends.nvidia.driver import make_tensordesc_arg

        described = TensorDescriptor(x, *self.boxes[i])
        new: list[Any] = in_context(make_tensordesc_arg, described, self.binary.metadata.tensordesc_meta[i])
        if len(made) >= _MOST_MAPS:
            made.pop(list(made)[0], None)  # noqa: RUF015  # other threads add to them
        made[address] = new
        return new

    def on_device(self) -> Any:
        return on_device(self.device)

    def made_fast(self, binary: Any) -> FastStart | None:
        """`fast_launcher` of the kernel's binary."""
        return fast_launcher(binary, len(self.boxes), *self.grid)


def on_device(device: torch.device) -> Any:
    if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
        how = "on a CPU, call attnc.verify.interpreter.ensure_interpreter() first, in a new process"
        raise ValueError(f"expected tensors on a CUDA device, got {device}: {how}")
    return torch.cuda.device(device if device.type == "cuda" else -1)


def in_context(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """make(...), also on a thread that has no CUDA context yet, without which no descriptor is made."""
    try:
        return make(*arguments, **options)
    except RuntimeError as error:
        if "device context" not in str(error):
            raise
        torch.zeros((), device="cuda")  # a launch of torch's brings one
        return make(*arguments, **options)


def fast_launcher(binary: Any, maps: int, x: int, y: int = 1, z: int = 1) -> FastStart | None:
    """Returns what starts a binary that takes so many maps, on a stream with arguments: Triton's C function,
    without its checks.

    None where this Triton's is not known to take them so, or where the kernel wants memory that Triton
    allocates. Hooks of Triton's launches are not called.
    """
    run, packed = binary.run, binary.packed_metadata
    if binary.metadata.target.backend != "cuda" or run.global_scratch_size or run.profile_scratch_size:
        return None
    if maps != len(getattr(binary.metadata, "tensordesc_meta", None) or ()):
        return None
    first, launch = (binary.function, run.launch_cooperative_grid, run.launch_pdl), run.launch
    match triton.__version__.split(".")[:2]:
        case ["3", "6"]:
            # Around the C function of a kernel with descriptors is one that makes them.
            if maps and inspect.isfunction(launch):
                launch = inspect.getclosurevars(launch).nonlocals["launcher"]
            return lambda stream, arguments: launch(
                x, y, z, stream, *first, None, None, packed, None, None, None, *arguments
            )
        case ["3", "7"]:
            if maps:
                launch = triton.runtime.driver.active.utils.launch  # not the one that makes descriptors
            rest = (packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
            return lambda stream, arguments: launch(x, y, z, stream, *first, *rest, arguments)
        case _:
            return None
