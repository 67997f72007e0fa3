"""The pieces of the function that launches a backward by wgmma, whose arguments begin with tensor maps."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.model.tensors import Role
from attnc.plan.ir_backward import BackwardKernel
from attnc.plan.sm90.backward import Sm90Backward
from attnc.target.sm80.backward_host import CudaBackwardHost
from attnc.target.sm80.backward_rows import finish_name
from attnc.target.sm80.host import addresses_of, batched
from attnc.target.sm90.backward import FINISH_PITCH, FINISH_WARPS
from attnc.target.triton.tensors import BY_QUERY

#: Rows that a warp stores at once.
_STORED_ROWS = 16
#: Pointers in a line of the packed arguments.
_POINTERS = 5


class Sm90BackwardHost(CudaBackwardHost):
    """As for `cuda.sm_80`, for kernels that copy by TMA."""

    launcher, launches_type = "sm90/_backward_launches.py.jinja", "_TiledLaunch"

    @property
    def _plan(self) -> Sm90Backward:
        plan = self._backward.layout
        assert isinstance(plan, Sm90Backward)
        return plan

    @property
    def size_of_dq(self) -> str:
        return f"{64 * self._plan.qk_pieces} * config.BLOCK_M"

    @property
    def layouts(self) -> Iterator[str]:
        """The map of each tensor, in the order of the struct."""
        queries, keys = self._plan.boxes
        for name in self._arguments.maps:
            tensor = self._arguments.tensors.by_name["o" if name == "do" else name.removeprefix("d")]
            by_query = name in BY_QUERY
            axes = [
                tensor.axis(role) for role in (Role.QUERY if by_query else Role.KEY, Role.HEAD, Role.BATCH)
            ]
            sizes = ", ".join("1" if axis is None else f"{name}.shape[{axis}]" for axis in axes)
            strides = ", ".join("0" if axis is None else f"{name}.stride({axis})" for axis in axes)
            rows = _STORED_ROWS if name in ("dq", "dk", "dv") else queries if by_query else keys
            yield f"_map_of(({name}.shape[{len(tensor.shape) - 1}], {sizes}), ({strides}), {rows})"

    @property
    def launch_lines(self) -> Iterator[str]:
        """With what TMA does not take copied, and all addresses, line by line like the fields."""
        matrices = self._matrices
        yield from addresses_of(matrices)
        yield f"if not call.backward.takes({' | '.join(f'{name}_at' for name in matrices)}):"
        copied = ("do", "q", "k", "v", "o")
        given = ", ".join(f"_copied({x.name})" if x.name in copied else x.name for x in self._given)
        yield f"    return _gradients({given}, configs)"
        yield "call.backward.start("
        yield f"    ({', '.join(f'{name}_at' for name in self._arguments.maps)},),"
        pointers = [
            f"{name}_at" if name in matrices else self._pointer_of(name)
            for _, name in self._arguments.pointers
            if name != "counter"
        ]
        yield from (f"    {', '.join(names)}," for names in batched(pointers, _POINTERS))
        yield ")"

    def _pointer_of(self, name: str) -> str:
        return "0 if dlse is None else dlse.data_ptr()" if name == "dlse" else f"{name}.data_ptr()"

    @property
    def sections(self) -> Iterator[str]:
        """KV heads whose q, do and sums of dq lie in the L2 cache together; nothing is walked by q heads."""
        section, kv_section = super().sections
        if not self.adds_dq:
            yield from (section, kv_section)
            return
        layout = self._plan.layout
        row = (layout.d + layout.dv) * layout.element.bytes + 64 * self._plan.qk_pieces * 4
        group = " * G" if self._kv_heads == "Hkv" else ""
        yield "section = 1"
        yield f"kv_section = _heads_per_section(gpu, B * {self._kv_heads}, M * {row}{group})"

    @property
    def calls(self) -> Iterator[tuple[str, str, str]]:
        for kernel, config, blocks in super().calls:
            is_last = kernel == finish_name(self.module)
            yield kernel, f"_finish_config({config})" if is_last else config, blocks

    @property
    def finish_changes(self) -> str:
        if not self.adds_dq:
            return ""
        row = (self._plan.layout.d + FINISH_PITCH) * self._plan.layout.element.bytes
        return f"WARPS={FINISH_WARPS}, STAGES=1, shared={row} * config.BLOCK_M"

    @property
    def kernels(self) -> Iterator[tuple[str, str, str]]:
        for name, source, configs in super().kernels:
            is_last = name == finish_name(self.module)
            yield name, source, f"tuple(map(_finish_config, {configs}))" if is_last else configs

    def _blocks(self, planned: BackwardKernel) -> str:
        if planned.name not in self._plan.by_wgmma:
            return super()._blocks(planned)
        return f"min({super()._blocks(planned)}, gpu.multiprocessors)"
