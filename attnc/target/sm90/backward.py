"""The pieces of the text of the kernels around those of Hopper for dq, dk and dv: first, joins, last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.expr.nodes import Const
from attnc.plan.ir import Module
from attnc.plan.ir.backward import walk_over_rows
from attnc.plan.sm90.backward import JOIN_WARPS, TURNS, Sm90Backward
from attnc.plan.steps import sequences
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import FinishText, JoinText, RowsText, default_of
from attnc.target.sm80.printer import CudaWalk, scalar
from attnc.target.sm90.backward_tiles import Sm90Arguments


def _declare_dq(plan: Sm90Backward, more: str = "") -> str:
    turns, behind = (f"TURNS = {TURNS}, ", " + TURNS") if plan.turns else ("", "")
    return f"constexpr int {turns}DQ_SIZE = {plan.layout.d_multiplied} * BLOCK_M{behind}{more};"


class Sm90PreprocessText(RowsText):
    """Text of the kernel that comes first: what `templates/cuda/backward_preprocess.cu.jinja` prints."""

    plan: Sm90Backward

    @property
    def turns(self) -> str:  # type: ignore[override]  # computed here
        return "((int*)args.dq_sum_ptr + (blockIdx.x + 1ll) * DQ_SIZE - TURNS)" if self.plan.turns else ""

    @property
    def clears(self) -> bool:  # type: ignore[override]  # computed here
        return self.plan.adds_dq and self.plan.turns is None

    @property
    def constants(self) -> Iterator[str]:
        if self.plan.adds_dq:
            yield _declare_dq(self.plan)


def join_name(module: Module) -> str:
    """Returns the function that adds dk and dv of the parts of walks."""
    return f"{module.variant.attention.name}_backward_join"


class Sm90JoinText(JoinText):
    """Text of the kernel that adds parts of dk and dv (`sm90/backward_join.cu.jinja`). factor: of dk."""

    def __init__(self, module: Module, arguments: Sm90Arguments) -> None:
        assert module.backward is not None
        last = default_of(module.backward.kernels[-1])
        own = replace(last, warps=JOIN_WARPS, stages=1)
        super().__init__(module, arguments, join_name(module), own, arguments.summed)
        scale = module.backward.kernels[0].chain.scale
        self.factor = "" if scale == 1.0 else f" * {scalar(Const(scale))}"


class Sm90FinishText(FinishText):
    """Text of the kernel that rounds dq: what `templates/sm90/backward_finish.cu.jinja` prints.
    find_sequence: statements that find the sequence of a packed tile, as `BackwardPlaces` numbers tiles.
    """

    sizes_from = ""
    plan: Sm90Backward

    def __init__(self, module: Module, arguments: ArgumentText) -> None:
        super().__init__(module, arguments)
        self.width, packed = f"D = {self.layout.d}", sequences(module.variant.attention)
        walk = CudaWalk(walk=walk_over_rows(packed), of_call="args.")
        self.find_sequence = [] if packed is None else list(walk.find_sequence(packed, "BLOCK_M"))

    @property
    def constants(self) -> Iterator[str]:
        yield _declare_dq(self.plan, f", DQ_PANEL = 64 * {self.plan.dq_columns[0]}")
        behind = self.plan.finish_pitch - self.layout.d
        yield f"constexpr int PITCH = D + {behind};  // rows of a fragment lie in different banks"
