"""The pieces of the Python module beside a `.cu` file: how the arguments are packed, and the grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnc.expr.show import show
from attnc.plan.ir import Arg, Kernel, Module
from attnc.target.prepared import PreparedText
from attnc.target.sm80.kernel import CudaText
from attnc.target.triton.kernel import KernelText

#: Tensors whose rows the kernel copies.
_MATRICES = ("q", "k", "v", "o")


def batched(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Runs of at most `size` items."""
    return (items[i : i + size] for i in range(0, len(items), size))


def addresses_of(names: Sequence[str]) -> Iterator[str]:
    """Statements that ask for the addresses of tensors once, where they are passed and looked at besides."""
    for some in batched(names, 5):
        places, values = ([form.format(name) for name in some] for form in ("{}_at", "{}.data_ptr()"))
        yield f"{', '.join(places)} = {', '.join(values)}"


class CudaHostText:
    """Text of the module; attribute by attribute what `templates/cuda/host.py.jinja` and its parts print.

    `call`: signature, checks and allocations of the callable, which are the same for every target.
    """

    #: The template of what makes launches ready.
    decisions = "cuda/_decisions.py.jinja"
    #: The one architecture that there are kernels for; empty: the oldest of many.
    only_for = ""

    def __init__(self, module: Module, kernel: Kernel, text: CudaText) -> None:
        self._module, self._kernel, self._text = module, kernel, text
        self.call = PreparedText(module, kernel, KernelText(module, kernel))
        self.function = module.variant.attention.name
        self.kernel = kernel.name
        self.is_split = False
        self.more_fields: list[str] = []  # of a prepared call, besides the launch; and what follows that
        self.also_kept = ""
        if kernel.grid.over == "head":
            rows = "((B, H, M), (H * M, M, 1))"
            dv = text.layout.dv
            acc = f"((B, H, M, {dv}), (H * M * {dv}, M * {dv}, {dv}, 1))"
            self.also_kept = f", ({acc}, {rows}, {rows})"
        self.sections = kernel.grid.over == "q"
        self.chunk = text.layout.chunk

    @property
    def _pointers(self) -> list[str]:
        names = [arg.tensor.name for arg in self._text.arguments]
        return names if self._kernel.grid.over == "q" else [*names, "acc", "l", "m"]

    @property
    def addresses_format(self) -> str:
        """Of `struct.Struct`: the pointers that struct Args begins with."""
        return f"={sum(map(len, self._pointer_lines))}Q"

    @property
    def numbers_format(self) -> str:
        """The strides and sizes behind them, laid out as C++ lays them out."""
        strides = sum(len(self._text.strides(arg)) for arg in self._text.arguments)
        sizes = len(self._text.size_names)
        return f"={strides}q{sizes}i{'4x' if sizes % 2 else ''}"

    @property
    def workspace(self) -> Iterator[str]:
        """What else is decided before the launch."""
        yield from ()

    @property
    def scratch(self) -> list[str]:
        """What kernels write besides the results."""
        return ["acc", "l", "m"] if self._kernel.grid.over == "head" else []

    @property
    def scratch_lines(self) -> Iterator[str]:
        """Its allocation."""
        if self.scratch:
            yield f"{', '.join(self.scratch)} = [_empty(layout, torch.float32, q) for layout in call.scratch]"

    @property
    def strides(self) -> Iterator[str]:
        """All strides by their names in the kernel."""
        for arg in self._text.arguments:
            wanted = self._text.strides(arg)
            names = [name if name in wanted else "_" for name in arg.strides]
            if wanted:
                given = f"{arg.tensor.name}.stride()"
                if arg in self._module.kept:
                    given = f"({', '.join('0' * len(names))}) if {arg.tensor.name} is None else {given}"
                yield f"{', '.join(names)}{',' if len(names) == 1 else ''} = {given}"

    @property
    def row_strides(self) -> Iterator[str]:
        """The other strides of the matrices, line by line, or-ed."""
        for i, arg in enumerate(self._matrices):
            names = " | ".join(self._text.strides(arg))
            yield f"{'| ' if i else ''}{names}"

    @property
    def _matrices(self) -> list[Arg]:
        return [arg for arg in self._text.arguments if arg.tensor.name in _MATRICES]

    @property
    def launches(self) -> Iterator[str]:
        """With the bits of the matrices' addresses, and all addresses, line by line like the fields."""
        matrices = [arg.tensor.name for arg in self._matrices]
        yield from addresses_of(matrices)
        yield "call.forward("
        yield f"    {' | '.join(f'{name}_at' for name in matrices)},"
        for names in self._pointer_lines:
            pointers = (f"{name}_at" if name in matrices else self._pointer(name) for name in names)
            yield f"    {', '.join(pointers)},"
        yield ")"

    @property
    def numbers(self) -> Iterator[str]:
        """Values of the rest of the struct, line by line like its fields."""
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
