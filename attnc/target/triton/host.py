"""The callable of a Triton module: what is prepared once for all calls alike, and the launch."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.show import show
from attnc.model.tensors import Role
from attnc.plan.ir import Kernel, Module
from attnc.plan.ir_backward import kernels_of
from attnc.target.prepared import PreparedText
from attnc.target.triton.kernel import KernelText
from attnc.target.triton.tensors import box


class HostText(PreparedText):
    """Text of the callable; attribute by attribute what `templates/triton/_host.py.jinja` prints."""

    #: The template of what makes launches ready.
    decisions = "triton/_decisions.py.jinja"

    def __init__(self, module: Module, kernel: Kernel, text: KernelText) -> None:
        super().__init__(module, kernel, text)
        self.kernel = kernel.name
        self.more_fields: list[str] = []  # of a prepared call, besides the first launch
        self.sections = kernel.grid.over == "q"
        self.begins_early = False
        self.persistent = kernel.grid.persistent
        self.has_boxes = kernel.tma
        self.uses_tma = kernel.tma or any(planned.kernel.tma for planned in kernels_of(module).values())

    @property
    def workspace(self) -> Iterator[str]:
        """What else is decided before the launch."""
        yield from ()

    @property
    def scratch(self) -> list[str]:
        """What kernels write besides the results."""
        return [] if self.sections else ["acc", "l", "m"]

    @property
    def scratch_layouts(self) -> str:
        rows = "((B, H, M), (H * M, M, 1))"
        dv = self._text.dv
        return f"((B, H, M, {dv}), (H * M * {dv}, M * {dv}, {dv}, 1)), {rows}, {rows}"

    @property
    def scratch_lines(self) -> Iterator[str]:
        """Its allocation."""
        if self.scratch:
            yield f"{', '.join(self.scratch)} = [_empty(layout, torch.float32, q) for layout in call.scratch]"

    @property
    def grid(self) -> str:
        if not self.sections:
            return "B * H,"
        sequences = self._kernel.grid.sequences
        tiles = "triton.cdiv(M, config.BLOCK_M) * B * H"
        if sequences is not None:
            tiles = f"({show(sequences.rows)} // config.BLOCK_M + B + 1) * H"
        return f"min({tiles}, _multiprocessors(q.device))," if self._kernel.grid.persistent else f"{tiles},"

    @property
    def tensors(self) -> str:
        """Arguments of the launch: the matrices, and whatever else has memory."""
        tensors = self._text.parameter_lines[0]
        others = (name.removesuffix("_ptr") for name in tensors[len(self._text.matrices) :])
        return ", ".join([*self._text.matrices, *others])

    @property
    def launches(self) -> Iterator[str]:
        """With all that has an address."""
        yield f"call.forward({self.tensors})"

    @property
    def boxes(self) -> Iterator[str]:
        """Arguments of `_boxes`: the matrices, as the copy engine moves them."""
        return map(self._box, self._text.matrices)

    @property
    def numbers(self) -> Iterator[str]:
        """Strides and sizes, line by line like the kernel's parameters."""
        for arg in (*self.module.args, *self.module.outputs):
            strides = dict(zip(arg.strides, range(len(arg.strides)), strict=True))
            line = ", ".join(f"{arg.tensor.name}.stride({strides[name]})" for name in self._text.strides(arg))
            if line:
                yield line
        for arg in self.module.kept:
            yield ", ".join(f"_stride({arg.tensor.name}, {axis})" for axis in range(len(arg.axes)))
        yield self._sizes_line

    @property
    def _sizes_line(self) -> str:
        return ", ".join(self._section if name == "SECTION" else name for name in self._text.sizes)

    @property
    def more_constants(self) -> str:
        """Constants of the launch besides the sizes of a tile."""
        return ""

    @property
    def _section(self) -> str:
        heads = self._text.all_heads
        length = "N" if self.longest == "N" else f"{self.longest} // B"
        return f"_heads_per_section(k, {self._text.rows('v').tensor}, {heads}, {length})"

    def _box(self, name: str) -> str:
        tensor = next(t for t in (*self.inputs, *self.results) if t.name == name)
        rows = Role.QUERY if name in ("q", "o") else Role.KEY
        tile = "config.BLOCK_M" if name in ("q", "o") else "config.BLOCK_N"
        width = self._text.block_dv if name in ("v", "o") else self._text.block_d
        return box(name, tensor, rows, tile, width)
