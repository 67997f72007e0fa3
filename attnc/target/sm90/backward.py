"""The pieces of the text of the Hopper kernel for dk and dv that its templates place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.expr.nodes import Const, Index, Ref, walk
from attnc.plan.ir import Fetch, Module, Statement, fetch_expressions
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.sm80.layout import GRANULE, CudaLayout
from attnc.plan.sm90.backward import DS_TILES, JOIN_WARPS, P_TILES, TURNS, Sm90Backward
from attnc.plan.steps import select_per_head
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import CudaFileText, FinishText, RowsText, default_of
from attnc.target.sm80.printer import scalar
from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90TileText


class Sm90BackwardText(Sm90TileText):
    """Attribute by attribute what `templates/sm90/backward_dkdv.cu.jinja` and its parts print."""

    ds_tiles, p_tiles = DS_TILES, P_TILES

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned)
        self.makes_dk, self.makes_dv = "dk" in planned.makes, "dv" in planned.makes
        self.gives_p = self.plan.gives_p
        self.k_tiles, self.staged = self.plan.k_tiles(planned.kind), self.plan.staged(planned.kind)
        # dk and dv leave beside each other, if both fit what a warp stages
        self.stores_beside = self.makes_dk and self.makes_dv and self.plan.stages_both(planned.kind)
        self.turns = self.plan.turns if self.chain.adds_dq is not None else None
        self.do_tiles = "1" if planned.kind == "dk" and self.latent is None else "STAGES"
        is_cut = bool(self.chain.adds_dq and self.end_of_own)  # dq sums over keys
        self.clears_values = planned.fills_keys or is_cut
        unkept = "kv_lo + row < N && !keeps(kv_lo + row)" if planned.fills_keys else "kv_lo + row >= N"
        self.is_cleared = unkept.replace("< N &&", ">= N ||") if is_cut else unkept
        if self.turns is not None and self.turns.first_varies:
            self.edge = self.loop.lo if self.turns.from_last else self.loop.hi
        self.adds_by_bulk = self.turns is not None or (self.plan.adds_by_bulk(planned.kind))

    @property
    def tiles_of_head(self) -> str:
        return "(N + BLOCK_N - 1) / BLOCK_N" if self.kernel.grid.sequences is not None else self.walk.tiles

    @property
    def template(self) -> str:
        """What prints it, of `templates/sm90`."""
        if self.latent is not None:
            return "backward_latent_dk"
        return "backward_dkdv_wide" if self.gives_p else "backward_dkdv"

    # -- what changes with the query head, where several share their keys ----------------------------------

    @property
    def late_program(self) -> tuple[Statement, ...]:
        return select_per_head(self.kernel.program) if self.groups else ()

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


class Sm90RowsText(Sm90TileText):
    """Attribute by attribute what `templates/sm90/backward_dq.cu.jinja` and its parts print."""

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned)
        self.q_tiles_ahead, v_tiles = self.plan.dq_tiles
        self.v_tiles_ahead = "STAGES" if v_tiles > 1 else "1"
        self.template = "backward_dq" if self.latent is None else "backward_latent_dq"

    @property
    def clears_values(self) -> bool:
        """Whether rows of k in a partial tile have to be made zero: TMA does so behind the tensor alone."""
        return self.kernel.step.kept is not None or "N" in self.sizes_of_tile


def text_of(
    module: Module, arguments: Sm90Arguments, planned: BackwardKernel
) -> tuple[Sm90BackwardText | Sm90RowsText, str]:
    """Returns the text of a kernel of wgmma, and the frame of its file."""
    made = Sm90RowsText if planned.over_q else Sm90BackwardText
    text = made(module, arguments, planned)
    return text, "sm90/backward_module" if text.latent is None else "sm90/latent_module"


def finish_pitch(layout: CudaLayout) -> int:
    """Returns the elements from a row of rounded dq to the next in shared memory: an odd number of chunks, so
    that the 8 rows of 4 pairs which a warp stores at once lie in all 32 banks.
    """
    return layout.d_multiplied + GRANULE


def _dq_constants(plan: Sm90Backward) -> Iterator[str]:
    size = f"{64 * plan.qk_panels} * BLOCK_M"
    if plan.turns:
        yield f"constexpr int TURNS = {TURNS}, DQ_SIZE = {size} + TURNS;"
    else:
        yield f"constexpr int DQ_SIZE = {size};"


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
            yield from _dq_constants(self.plan)


def join_name(module: Module) -> str:
    """Returns the function that adds dk and dv of the parts of walks."""
    return f"{module.variant.attention.name}_backward_join"


class Sm90JoinText(CudaFileText):
    """Text of the kernel that adds parts of dk and dv: what `templates/sm90/backward_join.cu.jinja` prints.

    joined: name, columns, scale as a factor, and whether it leaves in f32.
    """

    def __init__(self, module: Module, arguments: Sm90Arguments) -> None:
        assert module.backward is not None
        last = default_of(module.backward.kernels[-1])
        super().__init__(module, arguments, join_name(module), replace(last, warps=JOIN_WARPS, stages=1))
        self.makes = [name.removesuffix("_sum") for name in arguments.summed]
        widths = {"dk": f"D = {self.layout.d}", "dv": f"DV = {self.layout.dv}"}
        self.width = ", ".join(widths[name] for name in self.makes)
        scale = f" * {scalar(Const(module.backward.kernels[0].chain.scale))}"
        self.joined = [
            (
                name,
                "DV" if name == "dv" else "D",
                "" if name == "dv" else scale,
                name not in arguments.as_elements,
            )
            for name in self.makes
        ]


class Sm90FinishText(FinishText):
    """Text of the kernel that rounds dq: what `templates/sm90/backward_finish.cu.jinja` prints."""

    sizes_from = ""
    plan: Sm90Backward

    def __init__(self, module: Module, arguments: ArgumentText) -> None:
        super().__init__(module, arguments)
        self.width = f"D = {self.layout.d}"

    @property
    def constants(self) -> Iterator[str]:
        yield from _dq_constants(self.plan)
        behind = finish_pitch(self.layout) - self.layout.d
        yield f"constexpr int PITCH = D + {behind};  // rows of a fragment lie in different banks"
