"""The pieces of the Python module beside a Hopper kernel: tensor maps, packed arguments, the grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnc.expr.show import show
from attnc.model.tensors import DType, Role, Tensor
from attnc.plan.ir import Arg, Kernel, Module
from attnc.target.sm80.host import CudaHostText, addresses_of, batched
from attnc.target.sm90.kernel import Sm90Text

#: Bytes of a tensor map, and the alignment of a struct that has one.
_MAP, _ALIGNMENT = 128, 64
#: CU_TENSOR_MAP_DATA_TYPE_FLOAT16 and _BFLOAT16.
_MAP_TYPES = {DType.F16: 6, DType.BF16: 9}
#: Rows that a warp stores at once.
_STORED_ROWS = 16


class Sm90HostText(CudaHostText):
    """Attribute by attribute what `templates/sm90/host.py.jinja` and its parts print."""

    _text: Sm90Text
    decisions = "sm90/_decisions.py.jinja"
    only_for = "sm_90a"

    def __init__(self, module: Module, kernel: Kernel, text: Sm90Text) -> None:
        super().__init__(module, kernel, text)
        self.map_type = _MAP_TYPES[text.layout.element]
        self.longest_first = kernel.grid.longest_first
        self.sections = False  # its own are of equal sizes

    @property
    def _pointers(self) -> list[str]:
        return [arg.tensor.name for arg in self._text.arguments]

    @property
    def addresses_format(self) -> str:
        return f"={len(self._pointers) + 1}Q"

    @property
    def numbers_format(self) -> str:
        strides = sum(len(self._text.strides(arg)) for arg in self._text.arguments)
        sizes = len(self._text.size_names)
        bytes = _MAP * len(self._text.maps) + 8 * (len(self._pointers) + 1 + strides) + 4 * sizes
        padding = -bytes % _ALIGNMENT
        return f"={strides}q{sizes}i{f'{padding}x' if padding else ''}"

    @property
    def _mapped(self) -> list[Arg]:
        by_name = {arg.tensor.name: arg for arg in (*self._module.args, *self._module.outputs)}
        return [by_name[name] for name in self._text.maps]

    @property
    def layouts(self) -> Iterator[str]:
        """The map of each tensor, in the order of the struct."""
        for arg in self._mapped:
            tensor = arg.tensor
            axes = [self._axis(tensor, role) for role in self._roles(tensor)]
            sizes = ", ".join("1" if axis is None else f"{tensor.name}.shape[{axis}]" for axis in axes)
            strides = ", ".join("0" if axis is None else f"{tensor.name}.stride({axis})" for axis in axes[1:])
            rows = {"q": "config.BLOCK_M", "o": str(_STORED_ROWS)}.get(tensor.name, "config.BLOCK_N")
            yield f"_map_of(({sizes}), ({strides}), {rows})"

    def _roles(self, tensor: Tensor) -> Sequence[Role]:
        row = Role.KEY if tensor.name in ("k", "v") else Role.QUERY
        return (Role.FEATURE, row, Role.HEAD, Role.BATCH)

    def _axis(self, tensor: Tensor, role: Role) -> int | None:
        return len(tensor.shape) - 1 if role is Role.FEATURE else tensor.axis(role)

    @property
    def launches(self) -> Iterator[str]:
        mapped = [arg.tensor.name for arg in self._mapped]
        names = list(dict.fromkeys((*mapped, "o")))
        yield from addresses_of(names)
        results = ", ".join(tensor.name for tensor in self.call.results)
        copied = ("q", "k", "v")
        yield f"if not call.forward.takes({' | '.join(f'{name}_at' for name in names)}):"
        given = ", ".join(
            f"_copied({arg.tensor.name})" if arg.tensor.name in copied else arg.tensor.name
            for arg in self._module.args
        )
        kept = "".join(f", {arg.tensor.name}={arg.tensor.name}" for arg in self._module.kept)
        yield f"    made = {self.function}({given}{kept}, config=config)"
        if len(self.call.results) == 1:
            yield f"    return {results}.copy_(made)"
        else:
            yield f"    return tuple(given.copy_(x) for given, x in zip(({results}), made))"
        yield "call.forward.start("
        yield f"    ({', '.join(f'{name}_at' for name in mapped)},),"
        for some in batched(self._pointers, 5):
            pointers = (f"{name}_at" if name in names else self._pointer(name) for name in some)
            yield f"    {', '.join(pointers)},"
        yield ")"

    @property
    def _size_values(self) -> list[str]:
        if not self._kernel.grid.longest_first:
            return ["1" if name == "SECTION" else name for name in self._text.size_names]
        row = (self._text.layout.d + self._text.layout.dv) * self._text.layout.element.bytes
        sequences, longest = self._kernel.grid.sequences, self.call.longest
        length = "N" if longest == "N" else f"{longest} // B"
        shared = " // G" if "G" in self._kernel.dims else ""  # by the heads of a group
        heads = "B * H" if sequences is None else "H"
        queries = "M" if sequences is None else f"{show(sequences.rows)} // B"
        tiles = f"-(-{queries} // config.BLOCK_M)" if sequences is None else f"{queries} // config.BLOCK_M"
        section = f"_heads_of_section(gpu, {heads}, {length} * {row}{shared}, {tiles})"
        return [section if name == "SECTION" else name for name in self._text.size_names]

    @property
    def blocks(self) -> str:
        tiles, sequences = "-(-M // config.BLOCK_M) * B * H", self._kernel.grid.sequences
        if sequences is not None:
            tiles = f"({show(sequences.rows)} // config.BLOCK_M + B + 1) * H"
        return f"min({tiles}, gpu.multiprocessors)"
