"""The pieces of the text of Hopper backward kernels that their templates share: what is known of a tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from attnc.expr.nodes import Expr, Search, walk
from attnc.model.tensors import Role
from attnc.plan.ir import Module, Statement, statement_expressions
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.signature import stride_name
from attnc.plan.sm90.backward import CONSUMER_REGISTERS, LAST_ROUNDS, PRODUCER_REGISTERS, Sm90Backward, Turns
from attnc.plan.sm90.backward_work import BackwardWork, find_sizes_of_tile, plan_backward_work
from attnc.plan.sm90.latent import LatentBackward
from attnc.plan.steps import select_per_head
from attnc.target.kernel_view import BY_QUERY
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import CudaBackwardText
from attnc.target.sm80.printer import CudaWalk, sizes_of_call
from attnc.target.sm90.gradients import DkDv, Dq
from attnc.target.sm90.latent import LatentProducts
from attnc.target.sm90.shared_loads import SharedLoads
from attnc.target.sm90.tiles import FRAGMENT, WgmmaTiles, coordinates


class Sm90Arguments(ArgumentText):
    """As for `cuda.sm_80`, behind tensor maps, and with the counter that blocks take tiles from."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        layout = self._backward.layout
        assert isinstance(layout, Sm90Backward)
        leave = {"dk", "dv"} & {*self.as_elements} if layout.stores_boxes else set()
        v = ["v"] if "v" in self.tensors.by_name else []
        self.maps = ("q", "k", *v, "do", *(name for name in self.made if name in leave))

        #: dk and dv, where blocks may share the walk of a tile.
        self.summed = [f"{name}_sum" for name in ("dk", "dv") if name in self.made and layout.cuts_walks]

    @property
    def pointers(self) -> list[tuple[str, str]]:
        sums = [("float", name) for name in self.summed]
        lists = [("int", "_list_bits"), ("int", "_row_bits")] if self.module.lists is not None else []
        return [*super().pointers, *sums, *lists, ("int", "counter")]

    @property
    def sizes(self) -> list[str]:
        return [*super().sizes, *(["WALK_PARTS", "KEY_ROWS"] if self.summed else [])]

    @property
    def fields(self) -> Iterator[str]:
        yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        yield from super().fields


class Sm90BackwardText(CudaBackwardText):
    """Attribute by attribute what `templates/sm90/backward_d*.cu.jinja` and their parts print; scores, masks
    and derivatives are as for `cuda.sm_80`.

    One warp finds what tiles are; the others read in a record what it publishes of them.

    dkdv, dq: what a kernel has that is over keys, or over queries; latent: products of keys that are values
    too; turns: how blocks take turns at adding to dq, if they do; edge: the bound of the loops of the kv tile
    before that tells whether a turn is the first, if one does; gives_p: whether dv and dk have a warpgroup
    each, of which one gives p to the other; clears_values: whether rows of k in a partial tile have to be
    made zero: TMA does so behind the tensor alone.
    """

    plan: Sm90Backward
    loads: SharedLoads
    _loads_type = SharedLoads
    is_backward, is_decode = True, False
    vectors = ()
    producer_registers = PRODUCER_REGISTERS

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned)
        self.exchange, self.first_query, self.first_column = False, "0", ""  # each warp has its own rows
        self.consumers = self.plan.consumers(planned.kind)
        self.consumer_registers = CONSUMER_REGISTERS[self.consumers]
        self.blocks = self.plan.blocks(planned.kind)
        self.key_tiles = [self.plan.tile(planned.kind)[1 if self.over_q else 0]]
        width = {"dv": self.layout.dv_multiplied}
        others = self.layout.d_multiplied
        self.latent: LatentProducts | None = None
        if isinstance(self.plan, LatentBackward):
            self.latent = LatentProducts(self.plan, planned.kind, self.chain.slope)
            self.chain = replace(self.chain, slope=None)
            columns, more = self.latent.widths, []
        else:
            columns = [width.get(name, others) for name in planned.makes]
            more = ["WGMMA_SS_ROWS(64)"] if self.chain.adds_dq else []
        self.wgmma = WgmmaTiles(self.layout, key_tiles=self.key_tiles, sum_columns=columns, more_wgmma=more)
        normalises = planned.softmax.normalises
        needs_slope = planned.chain.slope is not None or not normalises
        # p is rounded at once where a slope stands between it and ds, if there are registers for that
        self.packs_p = needs_slope and {"dk", "dv"} <= set(planned.makes)
        has_room = not self.packs_p or self.plan.has_room_for_two_p(planned.kind)
        # adjoints want scores and ds of an element together; bits of what dropout keeps would take registers
        self.p_first = has_room and not planned.chain.adjoints and self.kernel.softmax.dropout is None
        self.packs_p = self.packs_p and self.p_first
        self.begins_dp = self.p_first and normalises
        self.queries_in_box, self.keys_in_box = self.plan.boxes
        self.cuts_walks = not self.over_q
        self.gives_p = self.plan.gives_p and not self.over_q
        self.turns: Turns | None = None if self.chain.adds_dq is None or self.over_q else self.plan.turns
        from_last = self.turns is not None and self.turns.from_last
        self.loop = replace(self.loop, ascends=self.over_q or from_last)
        self.edge = ""
        if self.turns is not None and self.turns.first_varies:
            self.edge = self.loop.lo if self.turns.from_last else self.loop.hi
        self.dkdv: DkDv | None = None
        self.dq: Dq | None = None
        if self.over_q:
            self.dq = Dq(self.plan)
            self.clears_values = planned.step.kept is not None or "N" in self.sizes_of_tile
        else:
            is_cut = bool(self.chain.adds_dq and self.end_of_own)  # dq sums over keys
            self.clears_values = planned.fills_keys or is_cut
            self.dkdv = DkDv(
                self.plan, planned, fetches=self.loads.row_fetches, late=self.late_program, is_cut=is_cut
            )

    _fragment = FRAGMENT

    @property
    def template(self) -> str:
        """What prints it, of `templates/sm90`."""
        if self.over_q:
            return "backward_dq" if self.latent is None else "backward_latent_dq"
        if self.latent is not None:
            return "backward_latent_dk"
        return "backward_dkdv_wide" if self.gives_p else "backward_dkdv"

    @property
    def frame(self) -> str:
        """That of its file."""
        return "sm90/backward_module" if self.latent is None else "sm90/latent_module"

    @property
    def walk(self) -> CudaWalk:
        walk = super().walk
        if self.cuts_walks and self.groups:
            walk = replace(walk, parts="head_parts", heads_of_part="part_heads")
        if self.turns is None:
            return replace(walk, last_rounds=LAST_ROUNDS)
        return replace(walk, walk=replace(walk.walk, last_first=self.turns.from_last))

    @property
    def tiles_of_head(self) -> str:
        """How many kv tiles take turns at a q tile."""
        return "(N + BLOCK_N - 1) / BLOCK_N" if self.kernel.grid.sequences is not None else self.walk.tiles

    @property
    def search_lanes(self) -> str:
        return "32" if self._searches_together else ""

    @property
    def _searches_together(self) -> bool:
        def searches(exprs: Iterable[Expr]) -> bool:
            return any(isinstance(node, Search) for expr in exprs for node in walk(expr))

        regions = self.kernel.regions
        found = (*self.kernel.program, *regions.statements)
        bounds = [expr for x in found for expr in statement_expressions(x)]
        bounds += [expr for loop in regions.loops for expr in loop.expressions]
        return searches(bounds) and not searches(e for x in self.loop.tests for e in statement_expressions(x))

    def coordinates(self, name: str, row: str) -> str:
        return coordinates(self.row_zero(name), row)

    def multiplied(self, name: str) -> str:
        return "DV" if name == "dv" else "D"

    def stored(self, name: str) -> str:
        return self.wgmma.dv_stored if name == "dv" else self.wgmma.d_stored

    def stored_sums(self, name: str) -> str:
        columns = self.stored(name)
        is_part = self.multiplied(name) != columns
        return f"(const float (&)[{columns} / 8][4]){name}" if is_part else name

    @property
    def end_of_own(self) -> str:
        size = "M" if self.over_q else "N"
        return size if size in self.sizes_of_tile else ""

    @property
    def clears_queries(self) -> bool:
        attention = self.module.variant.attention
        return not self.over_q and (attention.q.storage.is_packed or "M" in attention.lengths)

    def is_summed(self, name: str) -> bool:
        """Returns whether a gradient leaves in f32, to be added to."""
        return name != "dq" and name not in self.as_elements

    def row_stride(self, name: str) -> str:
        """Of a gradient: from one row to the next."""
        tensor = self.arguments.tensors.by_name[name]
        axis = tensor.axis(Role.QUERY if name in BY_QUERY else Role.KEY)
        assert axis is not None
        return stride_name(tensor, axis)

    # -- what is said of a tile ----------------------------------------------------------------------------

    @property
    def own(self) -> str:
        return "q_lo" if self.over_q else "kv_lo"

    @property
    def late_program(self) -> tuple[Statement, ...]:
        """What changes with the query head, where several share their keys."""
        return select_per_head(self.kernel.program) if self.groups and not self.over_q else ()

    @property
    def sizes_of_tile(self) -> frozenset[str]:
        return find_sizes_of_tile(self.kernel, over_q=self.over_q)

    @cached_property
    def work(self) -> BackwardWork:
        tensors, is_packed = self.arguments.tensors, self.kernel.grid.sequences is not None
        place = {
            "b": True,
            "h" if self.over_q else self.kv_name: True,
            "sequence": is_packed and self.over_q,
            "q_first": tensors.packs(Role.QUERY),
            "k_first": tensors.packs(Role.KEY),
            "edge": bool(self.edge),
        }
        return plan_backward_work(
            self.kernel,
            self.dtypes,
            late=self.late_program,
            edge=self.edge,
            place=[name for name, exists in place.items() if exists],
            over_q=self.over_q,
        )

    # -- what is said of a part of a walk ------------------------------------------------------------------

    @property
    def part_fields(self) -> list[str]:
        """What is published of a part: its number, its query heads, and the bounds of its q tiles."""
        return ["part", *(["h_first", "h_last"] if self.groups else []), "q_from", "q_to"]

    @property
    def whole_walk(self) -> dict[str, str]:
        """What a walk that is not cut begins and ends with; `work.lo`, where that is published."""
        bounds = {"lo": self.loop.lo, "hi": self.loop.hi} if self.cuts_walks else {}
        return {
            name: f"work.{name}" if bound == name and name in self.work.published else bound
            for name, bound in bounds.items()
        }

    @property
    def read_sizes(self) -> Iterator[str]:
        yield from sizes_of_call(name for name in self.kernel.dims if name not in self.sizes_of_tile)
