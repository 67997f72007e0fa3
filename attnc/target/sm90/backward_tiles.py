"""The text of Hopper kernels of gradients, part by part, and the arguments that all of a module take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.plan.ir import Module
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.sm90 import backward_roles_of
from attnc.plan.sm90.backward import Sm90Backward
from attnc.plan.sm90.backward_roles import list_sum_columns
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import BackwardSizes, CudaBackwardText
from attnc.target.sm80.backward_step import Factors
from attnc.target.sm80.printer import CudaWalk
from attnc.target.sm90.shared_loads import SharedLoads
from attnc.target.sm90.tiles import FRAGMENT, Boxes, WgmmaTiles


class Sm90Arguments(ArgumentText):
    """As for `cuda.sm_80`, behind tensor maps, and with the counter that blocks take tiles from."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        layout = self._backward.layout
        assert isinstance(layout, Sm90Backward)
        leave = {"dk", "dv"} & {*self.as_elements} if layout.stores_boxes else set()
        v = ["v"] if "v" in self.tensors.by_name else []
        self.maps = ("q", "k", *v, "do", *(name for name in self.made if name in leave))
        self.summed = [f"{name}_sum" for name in ("dk", "dv") if name in self.made and layout.cuts_walks]
        self._spans = ["SPANS"] if layout.spans_keys else []

    @property
    def pointers(self) -> list[tuple[str, str]]:
        return [*super().pointers, ("int", "counter")]

    @property
    def sizes(self) -> list[str]:
        return [*super().sizes, *(["WALK_PARTS", "KEY_ROWS"] if self.summed else []), *self._spans]

    @property
    def fields(self) -> Iterator[str]:
        yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        yield from super().fields


class Sm90BackwardText(CudaBackwardText):
    """What `templates/sm90/backward_d*.cu.jinja` and their parts print; scores, masks and derivatives are as
    for `cuda.sm_80`. One warp finds what tiles are; the others read in a record what it publishes of them.

    roles: as they are planned, with what kernels over keys have besides (dkdv), and products that two
    warpgroups share (latent); sums_kept: gradients that leave in f32, to be added to.
    """

    plan: Sm90Backward
    loads: SharedLoads
    boxes: Boxes
    _fragment = FRAGMENT

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        self.roles = roles = backward_roles_of(planned)
        super().__init__(module, arguments, planned)
        # rows of v that come as tiles may be anything, where no query sees them
        self.mask.clears_ds |= planned.over_q and roles.clears_values and not roles.p_first
        self.warps = replace(self.warps, exchange=False, spreads=False, sliced=False)
        self.sizes = BackwardSizes(planned, roles.work.sizes)
        self.dkdv, self.latent = roles.dkdv, roles.latent
        from_last = roles.turns is not None and roles.turns.from_last
        self.loop = replace(self.loop, ascends=planned.over_q or from_last)
        self.search_lanes = "32" if roles.searches_together else ""
        if self.latent is not None and not self.latent.apart:  # p^T do takes p without the factor of ds
            self.factors = Factors(planned, self.sums, at_once=True)
            self.chain = replace(self.chain, slope=None)
        columns = list_sum_columns(planned, roles, self.layout)
        more = sorted(set(self.plan.dq_columns)) if self.chain.adds_dq else []
        tiles = [] if planned.takes_ds else [roles.key_tile]
        held = tiles if self.dkdv is not None and self.dkdv.holds_rows else []
        tiles = [] if roles.gives_p and held else tiles  # it multiplies no others
        self.wgmma = WgmmaTiles(
            self.layout, key_tiles=tiles, sum_columns=columns, SS_ROWS=more, RS_COLUMNS=held
        )
        self.boxes = Boxes(self.rows.zero)
        self.sums_kept = {"dk", "dv"}.difference(arguments.as_elements)

    def _make_loads(self) -> SharedLoads:
        """A weight that nothing normalises is read for dv alone: others start from its derivative."""
        return SharedLoads(
            self.kernel,
            self.dtypes,
            mode=self.mask.mode,
            show=self._show,
            statement=self.statement,
            reads_score=self.kernel.softmax.normalises or "dv" in self.kernel.makes,
        )

    @property
    def walk(self) -> CudaWalk:
        walk, turns = super().walk, self.roles.turns
        if self.roles.cuts_walks and self.kernel.sums_heads:
            walk = replace(walk, parts="head_parts", heads_of_part="part_heads")
        if turns is None:
            return replace(walk, last=self.roles.last, farthest_first=self.roles.walks)
        walk = replace(walk, walk=replace(walk.walk, last_first=turns.from_last))
        divides = self.roles.spans and turns.from_last
        return replace(walk, last=self.roles.last, spans="SPANS") if divides else walk


def template_of(text: Sm90BackwardText) -> tuple[str, str]:
    if text.latent is not None:
        return f"sm90/backward_latent_{'dq' if text.kernel.over_q else 'dk'}", "sm90/latent_module"
    wide = "_wide" if text.roles.gives_p else ""
    return f"sm90/{text.kernel.structure}{wide}", "sm90/backward_module"
