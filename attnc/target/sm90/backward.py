"""The pieces of the text of the Hopper backward kernel that its templates place."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Const, Index, Ref, walk
from attnc.model.tensors import Role
from attnc.plan.ir import Fetch, Module, Statement, fetch_expressions
from attnc.plan.ir_backward import BackwardKernel
from attnc.plan.sm90.backward import (
    COPY_REGISTERS,
    DS_TILES,
    K_TILES,
    MULTIPLY_REGISTERS,
    STAGED,
    Sm90Backward,
)
from attnc.plan.steps import of_a_head
from attnc.target.sm80.arguments import Arguments
from attnc.target.sm80.backward import CudaBackwardText
from attnc.target.sm80.backward_rows import FinishText
from attnc.target.sm90.wgmma import wgmma

#: Up to so many columns of q, dq is added from registers, faster than by bulk copies that add, which win
#: beyond (measured on an H200).
_ADDS_FROM_REGISTERS = 64
#: Warps that round dq, each what one of those that multiply has added; elements between the rows that they
#: leave in shared memory.
FINISH_WARPS, FINISH_PITCH = 8, 8


class Sm90Arguments(Arguments):
    """As for `cuda.sm_80`, behind tensor maps, and with the counter that blocks take tiles from."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.maps = ("q", "k", "v", "do", *self.as_elements)

    @property
    def pointers(self) -> list[tuple[str, str]]:
        return [*super().pointers, ("int", "counter")]

    @property
    def fields(self) -> Iterator[str]:
        yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        yield from super().fields


class Sm90BackwardText(CudaBackwardText):
    """Attribute by attribute what `templates/sm90/backward_dkdv.cu.jinja` and its parts print; scores, masks
    and derivatives are as for `cuda.sm_80`.
    """

    plan: Sm90Backward
    is_backward = True
    stores_by_tma, stores_by_thread = True, False
    searches_together = False
    vectors = ()
    k_tiles, ds_tiles, staged = K_TILES, DS_TILES, STAGED
    copy_registers, multiply_registers = COPY_REGISTERS, MULTIPLY_REGISTERS

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned)
        self.clears_values = planned.fills_keys
        self.key_tiles = [self.plan.queries]
        self.adds_by_bulk = self.layout.d > _ADDS_FROM_REGISTERS
        derives = planned.chain.slope is not None or planned.chain.shared or planned.chain.adjoints
        self.p_first = not derives and self.kernel.softmax.dropout is None

    def wgmma(self, columns: int, *, registers: bool, by_rows: bool = False) -> str:
        return wgmma(columns, self.ptx, registers=registers, by_rows=by_rows)

    def coordinates(self, name: str, row: str) -> str:
        """Row, head and batch of a box."""
        tensor = self.arguments.tensors.by_name[name.removeprefix("d") if name != "do" else "o"]
        by_query = name in ("q", "do")
        has_head = tensor.axis(Role.HEAD) is not None and (by_query or self.kernel.kv_head != Const(0))
        head = ("h" if by_query else self.kv_name) if has_head else "0"
        return f"{row}, {head}, {'b' if tensor.axis(Role.BATCH) is not None else '0'}"

    # -- what changes with the query head, where several share their keys ----------------------------------

    @property
    def late_program(self) -> tuple[Statement, ...]:
        """What is computed anew for each tile of queries."""
        return of_a_head(self.kernel.program) if self.groups else ()

    @property
    def tile_program(self) -> tuple[Statement, ...]:
        """What is computed once for a tile of keys."""
        late = self.late_program
        return tuple(item for item in self.kernel.program if item not in late)

    @property
    def late_fetches(self) -> tuple[Fetch, ...]:
        return tuple(fetch for fetch in self.row_fetches if self._is_late(fetch))

    @property
    def tile_fetches(self) -> tuple[Fetch, ...]:
        return tuple(fetch for fetch in self.row_fetches if not self._is_late(fetch))

    def _is_late(self, fetch: Fetch) -> bool:
        names = {item.name for item in self.late_program}
        row = fetch.row.name if fetch.row else ""
        nodes = [node for expr in fetch_expressions((fetch,)) for node in walk(expr)]
        by_name = row in names or any(isinstance(node, Ref) and node.name in names for node in nodes)
        return self.groups and (by_name or Index("h") in nodes)


class Sm90FinishText(FinishText):
    """Text of the kernel that rounds dq: what `templates/sm90/backward_finish.cu.jinja` prints."""

    plan: Sm90Backward

    @property
    def constants(self) -> Iterator[str]:
        yield f"constexpr int DQ_SIZE = {64 * self.plan.qk_pieces} * BLOCK_M;"
        yield f"constexpr int PITCH = D + {FINISH_PITCH};  // rows of a fragment lie in different banks"
