"""The pieces of the Python module beside a `.cu` file: how the arguments are packed, and the grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnc.expr.show import show
from attnc.model.tensors import Tensor
from attnc.plan.ir import Arg, Kernel, Module
from attnc.target.call import CallText
from attnc.target.cuda_kernel import CudaText
from attnc.target.triton import torch_dtype
from attnc.target.triton_kernel import KernelText

#: Tensors whose rows the kernel copies.
_MATRICES = ("q", "k", "v", "o")


def batched(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Runs of at most `size` items."""
    return (items[i : i + size] for i in range(0, len(items), size))


class CudaCall(CallText):
    """The callable's text, with allocations that take fewer microseconds."""

    def _empty(self, tensor: Tensor, shape: str) -> str:
        same = tensor.dtype == self.module.variant.attention.q.dtype
        return f"q.new_empty({shape}{'' if same else f', dtype={torch_dtype(tensor)}'})"


class CudaHostText:
    """Text of the module; attribute by attribute what `templates/cuda/host.py.jinja` and its parts print.

    `call`: signature, checks and allocations of the callable, which are the same for every target.
    """

    def __init__(self, module: Module, kernel: Kernel, text: CudaText) -> None:
        self._module, self._kernel, self._text = module, kernel, text
        self.call = CudaCall(module, kernel, KernelText(module, kernel))
        self.function = module.variant.attention.name
        self.kernel = kernel.name
        self.is_split = False
        self.sections = kernel.grid.over == "q"
        self.chunk = text.layout.chunk

    @property
    def _pointers(self) -> list[str]:
        names = [arg.tensor.name for arg in self._text.arguments]
        return names if self._kernel.grid.over == "q" else [*names, "acc", "l", "m"]

    @property
    def format(self) -> str:
        """Of `struct.Struct`: pointers, strides and sizes, laid out as C++ lays out struct Args."""
        strides = sum(len(self._text.strides(arg)) for arg in self._text.arguments)
        sizes = len(self._text.size_names)
        padding = "4x" if sizes % 2 else ""
        return f"={sum(map(len, self._pointer_lines))}Q{strides}q{sizes}i{padding}"

    @property
    def workspace(self) -> Iterator[str]:
        if self._kernel.grid.over == "head":
            yield f"acc = q.new_empty((B, H, M, {self._text.layout.dv}), dtype=torch.float32)"
            yield "l, m = q.new_empty((2, B, H, M), dtype=torch.float32)"

    @property
    def strides(self) -> Iterator[str]:
        """All strides by their names in the kernel; the last of a matrix, which is to be 1, too."""
        for arg in self._text.arguments:
            wanted = self._text.strides(arg)
            names = [name if name in wanted else "_" for name in arg.strides]
            if arg.tensor.name in _MATRICES:
                names[-1] = _unit(arg)
            if names:
                given = f"{arg.tensor.name}.stride()"
                if arg in self._module.kept:
                    given = f"({', '.join('0' * len(names))}) if {arg.tensor.name} is None else {given}"
                yield f"{', '.join(names)}{',' if len(names) == 1 else ''} = {given}"

    @property
    def units(self) -> list[str]:
        """Strides of the last axes of the matrices."""
        return [_unit(arg) for arg in self._matrices]

    @property
    def matrices(self) -> str:
        return ", ".join(f"{arg.tensor.name}={arg.tensor.name}" for arg in self._matrices)

    @property
    def addresses(self) -> str:
        return " | ".join(f"{arg.tensor.name}.data_ptr()" for arg in self._matrices)

    @property
    def row_strides(self) -> Iterator[str]:
        """The other strides of the matrices, line by line, or-ed."""
        for i, arg in enumerate(self._matrices):
            names = " | ".join(name for name in self._text.strides(arg) if name != _unit(arg))
            yield f"{'| ' if i else ''}{names}"

    @property
    def _matrices(self) -> list[Arg]:
        return [arg for arg in self._text.arguments if arg.tensor.name in _MATRICES]

    @property
    def arguments(self) -> Iterator[str]:
        """Values of the packed struct, line by line like its fields."""
        for names in self._pointer_lines:
            yield ", ".join(map(self._pointer, names))
        for arg in self._text.arguments:
            if names := self._text.strides(arg):
                yield ", ".join(names)
        yield ", ".join(self._size_values)

    @property
    def _pointer_lines(self) -> list[Sequence[str]]:
        return list(batched(self._pointers, 5))

    @property
    def _size_values(self) -> list[str]:
        row = (self._text.layout.d + self._text.layout.dv) * self._text.layout.element.bytes
        sequences, longest = self._kernel.grid.sequences, self.call.longest
        length = "N" if longest == "N" else f"{longest} // B"
        section = f"_heads_per_section(gpu, {'B * H' if sequences is None else 'H'}, {length} * {row})"
        return [section if name == "SECTION" else name for name in self._text.size_names]

    def _pointer(self, name: str) -> str:
        if any(arg.tensor.name == name for arg in self._module.kept):
            return f"0 if {name} is None else {name}.data_ptr()"
        return f"{name}.data_ptr()"

    @property
    def blocks(self) -> str:
        if self._kernel.grid.over == "head":
            return "B * H"
        tiles, sequences = "-(-M // config.BLOCK_M) * B * H", self._kernel.grid.sequences
        if sequences is not None:
            tiles = f"({show(sequences.rows)} // config.BLOCK_M + B + 1) * H"
        return f"min({tiles}, gpu.multiprocessors)" if self._kernel.grid.persistent else tiles


def _unit(arg: Arg) -> str:
    return f"stride_{arg.tensor.name}d"
