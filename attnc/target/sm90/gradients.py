"""What the text of a Hopper backward kernel has besides, over keys and over queries."""

from __future__ import annotations

from collections.abc import Sequence

from attnc.expr.nodes import Index, Ref, walk
from attnc.plan.ir import Fetch, Statement, fetch_expressions
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.sm90.backward import DS_TILES, P_TILES, Sm90Backward
from attnc.plan.sm90.latent import LatentBackward


class DkDv:
    """Of a kernel over keys, for dk and dv. ds_tiles, p_tiles, do_tiles, k_tiles: tiles in shared memory;
    staged: rows of dk and dv that leave together; from_registers: they leave without; is_cleared: which rows
    of a partial tile are made zero; late_fetches, tile_fetches: loads of rows that change with the query
    head, and the others.
    """

    ds_tiles, p_tiles = DS_TILES, P_TILES

    def __init__(
        self,
        plan: Sm90Backward,
        planned: BackwardKernel,
        *,
        fetches: Sequence[Fetch],
        late: tuple[Statement, ...],
        is_cut: bool,
    ) -> None:
        """fetches: of rows; late: statements that wait for the query head; is_cut: whether dq sums over keys
        that end with a sequence.
        """
        self.makes_dk, self.makes_dv = "dk" in planned.makes, "dv" in planned.makes
        self.k_tiles, self.staged = plan.k_tiles(planned.kind), plan.staged(planned.kind)
        self.from_registers = plan.stores_registers(planned.kind)
        # dk and dv leave beside each other, if both fit what a warp stages
        self.stores_beside = self.makes_dk and self.makes_dv and plan.stages_both(planned.kind)
        is_alone = planned.kind == "dk" and not isinstance(plan, LatentBackward)
        self.do_tiles = "1" if is_alone else "STAGES"
        if planned.kind == "dk" and plan.pieces:
            self.do_tiles = str(plan.pieces)
        unkept = "kv_lo + row < N && !keeps(kv_lo + row)" if planned.fills_keys else "kv_lo + row >= N"
        self.is_cleared = unkept.replace("< N &&", ">= N ||") if is_cut else unkept
        has_turns = planned.chain.adds_dq is not None and plan.turns is not None
        self.adds_by_bulk = has_turns or plan.adds_by_bulk(planned.kind)
        names = frozenset(item.name for item in late) if planned.sums_heads else None
        self.late_fetches = tuple(fetch for fetch in fetches if _is_late(fetch, names))
        self.tile_fetches = tuple(fetch for fetch in fetches if not _is_late(fetch, names))


def _is_late(fetch: Fetch, names: frozenset[str] | None) -> bool:
    """Returns whether a load changes with the query head. names: of statements that do; None where a tile has
    one head.
    """
    if names is None:
        return False
    row = fetch.row.name if fetch.row else ""
    nodes = [node for expr in fetch_expressions((fetch,)) for node in walk(expr)]
    by_name = row in names or any(isinstance(node, Ref) and node.name in names for node in nodes)
    return by_name or Index("h") in nodes


class Dq:
    """Of a kernel over queries, for dq: tiles of q, and of v, that are copied ahead."""

    def __init__(self, plan: Sm90Backward) -> None:
        self.q_tiles_ahead, v_tiles = plan.dq_tiles
        self.v_tiles_ahead = "STAGES" if v_tiles > 1 else "1"
