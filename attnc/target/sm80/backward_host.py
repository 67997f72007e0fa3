"""The pieces of the function that launches a CUDA backward: what `templates/_autograd.py.jinja` prints
for this target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnc.expr.show import show
from attnc.model.tensors import Role
from attnc.plan.ir import Module
from attnc.plan.ir_backward import Backward, BackwardKernel
from attnc.plan.sm80 import backward_layout_of
from attnc.target.sm80.arguments import Arguments
from attnc.target.sm80.backward_rows import ROWS_WARPS, finish_name
from attnc.target.sm80.host import addresses_of, batched
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.backward_host import BackwardHostText, Made
from attnc.target.triton.parameters import config_name, limits_registers

#: Pointers in a line of the packed arguments.
_POINTERS = 5


class CudaBackwardHost(BackwardHostText):
    """Text of the function that launches the kernels. files: the kernels in the order of execution, with
    their sources.
    """

    launcher, launches_type = "cuda/_backward_launches.py.jinja", "_Launch"
    device, device_type, device_lines = "gpu", "Gpu", ("gpu = _gpu(q.get_device())",)
    quotient = "-(-{} // {})"

    def __init__(
        self, module: Module, backward: Backward, arguments: Arguments, files: Mapping[str, str]
    ) -> None:
        super().__init__(module, backward, [BackwardText(module, planned) for planned in backward.kernels])
        self._arguments, self.files = arguments, files
        self.adds_dq = arguments.adds_dq
        self.strided = arguments.has_dlse
        self.addresses_format, self.numbers_format = arguments.formats
        plan = backward_layout_of(backward)
        self._layout, self._sums = plan.layout, plan.sums
        self.limits_registers = any(limits_registers(planned.kernel) for planned in backward.kernels)
        self.packs_keys = arguments.tensors.packs(Role.KEY)
        self.pieces = self._layout.qk.width // 16
        self._kv_heads = "Hkv" if "Hkv" in arguments.sizes else "H"

    @property
    def size_of_dq(self) -> str:
        """Floats of a q tile of dq while it is summed, where warps share it unlike those of mma.sync."""
        return ""

    @property
    def finish_changes(self) -> str:
        """What the kernel that rounds dq has unlike the one that sums it."""
        return ""

    @property
    def planned(self) -> Iterator[str]:
        if self.packs_queries:
            rows = [f"{config}.BLOCK_M" for config in self.configs]
            most = ", ".join(rows)
            yield f"ROW_TILE = max({most})" if len(rows) > 1 else f"ROW_TILE = {most}"
            yield f"M_padded = ({self._queries} // ROW_TILE + B + 1) * ROW_TILE"
        yield from super().planned

    def _sum_of_dq(self) -> Iterator[Made]:
        yield Made("dq", "q.shape", self._dtype("q"))
        shape = f"(B, H, {self._q_tiles}, _dq_size({self.configs[-1]}))"
        yield Made("dq_sum", shape, "torch.float32", zero=True)

    @property
    def _row_sizes(self) -> str:
        return "H, M_padded" if self.packs_queries else super()._row_sizes

    @property
    def _rounded_dq(self) -> Iterator[str]:
        """A kernel of its own does that."""
        yield from ()

    @property
    def _matrices(self) -> tuple[str, ...]:
        """Tensors whose rows the kernels copy."""
        return ("q", "k", "v", "o", "do", *self._arguments.made)

    @property
    def matrices(self) -> str:
        return ", ".join(self._matrices)

    @property
    def launch_lines(self) -> Iterator[str]:
        """With the bits of the matrices' addresses, and all addresses, line by line like the fields."""
        yield from addresses_of(self._matrices)
        yield "call.backward("
        yield f"    {' | '.join(f'{name}_at' for name in self._matrices)},"
        pointers = [
            f"{name}_at" if name in self._matrices else _pointer(name) for _, name in self._arguments.pointers
        ]
        yield from (f"    {', '.join(names)}," for names in batched(pointers, _POINTERS))
        yield ")"

    @property
    def numbers(self) -> Iterator[str]:
        """The rest of them."""
        for line in self._arguments.strides:
            yield ", ".join(value for _, value in line)
        values = {"SECTION": "section", "KV_SECTION": "kv_section"}
        yield ", ".join(values.get(name, name) for name in self._arguments.sizes)

    @property
    def sections(self) -> Iterator[str]:
        """Query heads whose K and V, and KV heads whose q and do, lie in the L2 cache together."""
        row = (self._layout.d + self._layout.dv) * self._layout.element.bytes
        group = " * G" if self._kv_heads == "Hkv" else ""
        keys = f"{self.longest} // B" if self.packs_keys else "N"
        queries = f"{self._queries} // B" if self.packs_queries else "M"
        q_heads = "H" if self.packs_queries else "B * H"
        kv_heads = self._kv_heads if self.packs_keys else f"B * {self._kv_heads}"
        yield f"section = _heads_per_section(gpu, {q_heads}, {keys} * {row})"
        yield f"kv_section = _heads_per_section(gpu, {kv_heads}, {queries} * {row}{group})"

    @property
    def _q_tiles(self) -> str:
        return self.quotient.format("M", f"{self.configs[-1]}.BLOCK_M")

    @property
    def calls(self) -> Iterator[tuple[str, str, str]]:
        """(kernel, config, blocks) in the order of execution."""
        rows = f"_row_config({self.configs[0]})"
        tiles = f"M_padded // {'ROW_TILE' if self.packs_queries else f'{self.configs[0]}.BLOCK_M * B'}"
        yield self._preprocess, rows, f"{tiles} * H"
        for planned in self._backward.kernels:
            yield planned.kernel.name, config_name(planned), self._blocks(planned)
        if self.adds_dq:
            yield finish_name(self.module), self.configs[-1], f"{self._q_tiles} * B * H"

    def _blocks(self, planned: BackwardKernel) -> str:
        """How many blocks of threads a kernel has."""
        grid, config = planned.kernel.grid, config_name(planned)
        block, heads = ("BLOCK_M", "H") if grid.over == "q" else ("BLOCK_N", self._kv_heads)
        if grid.sequences is not None:
            return f"({show(grid.sequences.rows)} // {config}.{block} + B + 1) * {heads}"
        match grid.over:
            case "q":
                return f"M_padded // {config}.BLOCK_M * B * {heads}"
            case "head":
                return f"B * {heads}"
            case _:
                return f"{self.quotient.format('N', f'{config}.BLOCK_N')} * B * {heads}"

    @property
    def _preprocess(self) -> str:
        assert self._backward.preprocess is not None
        return self._backward.preprocess.name

    @property
    def row_changes(self) -> str:
        """What the kernel for the rows has unlike the one whose tiles it shares."""
        own = f"WARPS={ROWS_WARPS}, STAGES=1, shared={4 * ROWS_WARPS if self._sums else 0}"
        return f"{own}, maxnreg=0" if self.limits_registers else own

    @property
    def kernels(self) -> Iterator[tuple[str, str, str]]:
        """(function, source, what it is compiled with)."""
        configs = {p.kernel.name: f'BACKWARD_CONFIGS["{p.name}"]' for p in self._backward.kernels}
        first = self._backward.kernels[0].name
        configs[self._preprocess] = f'tuple(map(_row_config, BACKWARD_CONFIGS["{first}"]))'
        configs[finish_name(self.module)] = f'BACKWARD_CONFIGS["{self._backward.kernels[-1].name}"]'
        for name, source in self.files.items():
            yield name, source, configs[name]


def _pointer(name: str) -> str:
    return "0 if dlse is None else dlse.data_ptr()" if name == "dlse" else f"{name}.data_ptr()"
