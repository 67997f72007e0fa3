"""What each role of a Hopper kernel of gradients does: what a work tile publishes, which product comes first,
which rows are made zero, and how dk and dv leave. All of it follows from the planned kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnc.expr.nodes import Expr, Index, Ref, Search, walk
from attnc.model.attention import Variant
from attnc.model.dtypes import DType
from attnc.plan.access import LastSection
from attnc.plan.ir import Fetch, Statement, fetch_expressions, statement_expressions
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.layout import Roles
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.backward import (
    CONSUMER_REGISTERS,
    DS_TILES,
    LAST_SECTION,
    LAST_SECTION_OF_PACKED,
    LAST_SECTION_OF_SPANS,
    P_TILES,
    PRODUCER_REGISTERS,
    Sm90Backward,
)
from attnc.plan.sm90.backward_work import BackwardWork, find_sizes_of_tile, plan_backward_work
from attnc.plan.sm90.latent import LatentBackward, SharedProducts, share_products
from attnc.plan.sm90.turns import Turns, WalkLengths, lengths_of_walks
from attnc.plan.steps import fetches_for, select_per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRoles:
    """Of a kernel over keys, for dk and dv. ds_tiles, p_tiles, k_tiles, do_tiles: tiles in shared memory, 0:
    one for each stage; staged: rows of dk and dv that leave together; from_registers: they leave without;
    stores_beside: dk and dv leave beside each other; holds_rows: rows of V, and of K where another warpgroup
    multiplies V, are left operands in registers; adds_by_bulk: dq is added by bulk copies; is_cut: dq
    sums over keys that end with a sequence; late_fetches, tile_fetches: loads of rows that change with the
    query head, and the others.
    """

    makes_dk: bool
    makes_dv: bool
    ds_tiles: int
    p_tiles: int
    k_tiles: int
    do_tiles: int
    staged: int
    from_registers: bool
    stores_beside: bool
    holds_rows: bool
    adds_by_bulk: bool
    is_cut: bool
    late_fetches: tuple[Fetch, ...]
    tile_fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90BackwardRoles(Roles):
    """The roles of one kernel. consumers: warpgroups that multiply; blocks: that share a multiprocessor;
    key_tile: keys of a tile; queries_in_box, keys_in_box: rows that TMA copies at once; searches_together:
    the lanes of the scheduler search together.

    packs_p: p is rounded at once; p_first: p is made before dp is waited for; begins_dp: dp is issued with
    the scores; gives_p: dv and dk have a warpgroup each, of which one gives p to the other; apart: each
    consumer has a program of its own; clears_queries,
    clears_values: rows of q, or of k in a partial tile, have to be made zero: TMA does so behind the tensor
    alone.

    cuts_walks: blocks may share the walk of a tile; cuts_at_queries: walks over a head are cut at the same
    queries, and not in equal shares; spans: kv tiles are divided into spans, with a sum of dq each; turns:
    how blocks take turns at adding to dq, None where they do not; edge: the bound of the loops of the kv tile
    before that tells whether a turn is the first, if one does; last: the last section; walks: how far tiles
    of packed sequences walk, where the farthest come first in it, if they go through several query heads;
    end_of_own: the size that a sequence ends the tiles of a block with, "" for none; late: statements that
    wait for the query head. dkdv: of a kernel over keys; latent: products that two warpgroups share.
    """

    consumers: int
    consumer_registers: int
    producer_registers: int
    blocks: int
    key_tile: int
    queries_in_box: int
    keys_in_box: int
    searches_together: bool
    packs_p: bool
    p_first: bool
    begins_dp: bool
    gives_p: bool
    apart: bool
    clears_queries: bool
    clears_values: bool
    cuts_walks: bool
    cuts_at_queries: bool
    spans: bool
    turns: Turns | None
    edge: Expr | None
    last: LastSection
    walks: WalkLengths
    end_of_own: str
    late: tuple[Statement, ...]
    work: BackwardWork
    dkdv: KeyRoles | None
    latent: SharedProducts | None


def plan_backward_roles(kernel: BackwardKernel, plan: Sm90Backward, variant: Variant) -> Sm90BackwardRoles:
    """Returns the roles of a kernel of wgmma that is planned but for them."""
    return _BackwardRolePlanner(kernel, plan, variant).plan_roles()


@dataclass(frozen=True, slots=True)
class _BackwardRolePlanner:
    kernel: BackwardKernel
    plan: Sm90Backward
    variant: Variant

    def plan_roles(self) -> Sm90BackwardRoles:
        kernel, plan, attention = self.kernel, self.plan, self.variant.attention
        kind, over_q, consumers = kernel.kind, kernel.over_q, plan.consumers(kernel.kind)
        queries_in_box, keys_in_box = plan.boxes
        late = select_per_head(kernel.program) if kernel.sums_heads else ()
        turns = None if kernel.chain.adds_dq is None or over_q else plan.turns
        edge = None
        if turns is not None and turns.first_varies:
            loops = kernel.regions.loops
            edge = loops[0].start if turns.from_last else loops[-1].stop
        sizes = find_sizes_of_tile(kernel)
        end_of_own = next((name for name in ("M" if over_q else "N",) if name in sizes), "")
        is_cut = bool(kernel.chain.adds_dq and end_of_own and not over_q)
        shows_values = kernel.step.kept is not None or "N" in sizes
        packs_p, p_first = self._order_p()
        walks = self._find_walks(turns)
        return Sm90BackwardRoles(
            consumers=consumers,
            consumer_registers=CONSUMER_REGISTERS[consumers],
            producer_registers=PRODUCER_REGISTERS,
            blocks=plan.blocks(kind),
            key_tile=plan.tile(kind)[1 if over_q else 0],
            queries_in_box=queries_in_box,
            keys_in_box=keys_in_box,
            searches_together=self._searches_together(),
            packs_p=packs_p,
            p_first=p_first,
            begins_dp=self._begins_dp(p_first),
            gives_p=plan.gives_p and not over_q,
            apart=self._has_apart_consumers(),
            clears_queries=not over_q and (attention.q.storage.is_packed or "M" in attention.lengths),
            clears_values=shows_values if over_q else kernel.fills_keys or is_cut,
            cuts_walks=not over_q,
            cuts_at_queries=turns is not None and plan.cuts_at_queries,
            spans=turns is not None and plan.spans_keys,
            turns=turns,
            edge=edge,
            last=self._find_last(walks, turns),
            walks=walks if kernel.sums_heads else "",  # those over one head are short
            end_of_own=end_of_own,
            late=late,
            work=plan_backward_work(
                kernel, self._dtypes, late=late, edge=edge, place=list(self._name_place(edge, turns))
            ),
            dkdv=None if over_q else self._plan_keys(late, is_cut=is_cut),
            latent=share_products(plan, kind) if isinstance(plan, LatentBackward) else None,
        )

    def _begins_dp(self, p_first: bool) -> bool:
        """Returns whether ds is a multiple of dp - delta, so that the product can start from -delta."""
        softmax = self.kernel.softmax
        changes_dp = softmax.rectifies or softmax.dropout is not None
        shares = isinstance(self.plan, LatentBackward)  # of which one makes p, in any case
        return (p_first or shares) and softmax.normalises and not changes_dp

    def _has_apart_consumers(self) -> bool:
        plan, kernel = self.plan, self.kernel
        adds_unevenly = kernel.chain.adds_dq is not None and not plan.shares_dq_evenly
        shares = isinstance(plan, LatentBackward) or (plan.gives_p and not kernel.over_q)
        return shares or (adds_unevenly and not kernel.over_q)

    def _find_last(self, walks: WalkLengths, turns: Turns | None) -> LastSection:
        if turns is not None and self.plan.spans_keys:
            return LAST_SECTION_OF_SPANS
        return LAST_SECTION_OF_PACKED if walks else LAST_SECTION

    def _find_walks(self, turns: Turns | None) -> WalkLengths:
        attention = self.variant.attention
        is_free = turns is None and not self.kernel.over_q and attention.k.storage.is_packed
        return lengths_of_walks(attention.mask) if is_free else ""

    @property
    def _dtypes(self) -> dict[str, DType]:
        attention = self.variant.attention
        tensors = (*attention.inputs, *attention.outputs)
        dtypes = {tensor.name: DType(tensor.dtype) for tensor in tensors}
        return {**dtypes, "do": dtypes[attention.o.name]}

    def _name_place(self, edge: Expr | None, turns: Turns | None) -> Iterable[str]:
        kernel, attention = self.kernel, self.variant.attention
        kv_name = "h" if kernel.kv_head == Index("h") else "h_kv"
        yield from ("b", "h" if kernel.over_q else kv_name)
        yield from ("sequence",) if kernel.grid.sequences is not None and kernel.over_q else ()
        yield from ("q_first",) if attention.q.storage.is_packed else ()
        yield from ("k_first",) if attention.k.storage.is_packed else ()
        yield from ("edge",) if edge is not None else ()
        yield from ("span",) if turns is not None and turns.from_last and self.plan.spans_keys else ()

    def _order_p(self) -> tuple[bool, bool]:
        """Returns whether p is rounded at once, and whether it is made before dp is waited for."""
        kernel = self.kernel
        needs_slope = kernel.chain.slope is not None or not kernel.softmax.normalises
        # p is rounded at once where a slope stands between it and ds, if there are registers for that
        packs_p = needs_slope and {"dk", "dv"} <= set(kernel.makes)
        has_room = not packs_p or self.plan.has_room_for_two_p(kernel.kind)
        # adjoints want scores and ds of an element together, and so do slopes of softpick's scores, whose
        # sign p keeps; bits of what dropout keeps would take registers
        signs = kernel.softmax.rectifies and kernel.chain.slope is not None
        apart = kernel.chain.adjoints or signs or kernel.softmax.dropout is not None
        p_first = has_room and not apart
        return packs_p and p_first, p_first

    def _searches_together(self) -> bool:
        regions = self.kernel.regions
        bounds = [*_expressions_of((*self.kernel.program, *regions.statements))]
        bounds += [expr for loop in regions.loops for expr in loop.expressions]
        return _searches(bounds) and not _searches(_expressions_of(regions.tests))

    def _plan_keys(self, late: Sequence[Statement], *, is_cut: bool) -> KeyRoles:
        kernel, plan, kind = self.kernel, self.plan, self.kernel.kind
        makes_dk, makes_dv = "dk" in kernel.makes, "dv" in kernel.makes
        is_alone = kind == "dk" and not isinstance(plan, LatentBackward)
        do_tiles = plan.pieces if kind == "dk" and plan.pieces else int(is_alone)
        names = frozenset(item.name for item in late) if kernel.sums_heads else None
        every = dict.fromkeys((*kernel.outer, *kernel.step.fetches, *kernel.step.masked_fetches))
        rows = [fetch for fetch in every if fetch.axes == ("kv",)]
        has_turns = kernel.chain.adds_dq is not None and plan.turns is not None
        return KeyRoles(
            makes_dk=makes_dk,
            makes_dv=makes_dv,
            ds_tiles=DS_TILES,
            p_tiles=P_TILES,
            k_tiles=plan.k_tiles(kind),
            do_tiles=do_tiles,
            staged=plan.staged(kind),
            from_registers=plan.stores_registers(kind),
            holds_rows=plan.holds_rows(kind),
            stores_beside=makes_dk and makes_dv and plan.stages_both(kind),
            adds_by_bulk=has_turns or plan.adds_by_bulk(kind),
            is_cut=is_cut,
            late_fetches=tuple(fetch for fetch in rows if _is_late(fetch, names)),
            tile_fetches=tuple(fetch for fetch in rows if not _is_late(fetch, names)),
        )


def list_sum_columns(kernel: BackwardKernel, roles: Sm90BackwardRoles, layout: CudaLayout) -> list[int]:
    """Lists the columns of sums of a kernel, by gradient, or by warpgroup where two share them."""
    if roles.latent is not None:
        return list(roles.latent.widths)
    return [layout.dv_multiplied if name == "dv" else layout.d_multiplied for name in kernel.makes]


def list_shared_columns(kernel: BackwardKernel, dtypes: Mapping[str, DType]) -> list[Fetch]:
    """Lists the integers that a mask reads of each column of a partial tile: a lane loads every 32nd, ahead
    of the products, and shows it to the others. (The mask is tested between products, where nothing hides a
    load.)
    """
    keep, along = kernel.step.keep, ("kv",) if kernel.over_q else ("q",)
    assert keep is not None
    every = tuple(dict.fromkeys((*kernel.outer, *kernel.step.fetches, *kernel.step.masked_fetches)))
    wanted = [fetch for fetch in every if fetch.axes == along and fetch in fetches_for(every, keep)]
    narrow = (DType.I32, DType.U8)
    return [x for x in wanted if x.load.within is not None or dtypes[x.load.tensor] in narrow]


def _expressions_of(statements: Iterable[Statement]) -> Iterable[Expr]:
    return (expr for item in statements for expr in statement_expressions(item))


def _searches(exprs: Iterable[Expr]) -> bool:
    return any(isinstance(node, Search) for expr in exprs for node in walk(expr))


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
