"""Variant + schedule -> the backward kernels: FlashAttention-2 (arXiv 2307.08691), algorithm 2.

backward_dq     a program per q tile, with the forward's loops: dq in registers, hence without atomics. It
                comes first, and leaves delta = rowsum(do * o) and the base-2 lse of its rows for
backward_dkdv   a program per kv tile: dk and dv in registers, the inner loop over the q tiles that see it
                (the forward's regions, transposed), for each of the query heads that share it

Both compute the scores: seven dots where one kernel would need five, yet on Hopper they are faster than
adding dq to memory. Where the accumulators of dk and dv do not fit a kernel, each has its own. Where v is
columns of k there is one sum of both, dk = dS^T Q + P^T dO, in one kernel. With
`accumulate.dq = atomic` a small kernel makes the rows, the second one adds to a f32 dq, and the first is left
out; with `sequential` one program for each head walks over all kv tiles, so that nothing is added at the same
time (FlashAttention-1, arXiv 2205.14135, algorithm 4).

Where every query selects keys by a list of its own, kernels are those of `plan/selected.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from attnc.expr.construct import conj
from attnc.expr.derive import derive
from attnc.expr.nodes import TRUE, Compare, Dim, Expr, Index
from attnc.expr.simplify import scale_by
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.schedule import BackwardConfig, Schedule
from attnc.plan.decay import Decay, decay_of
from attnc.plan.differentiable import differentiates_selection
from attnc.plan.epilogue import plan_epilogue_gradient
from attnc.plan.gradients import WantedLoad, adjoint_of, chain_rule, names_of_sum, wanted_loads
from attnc.plan.ir import (
    Axis,
    Grid,
    OutputKernel,
    Probabilities,
    Regions,
    expressions_of,
    statement_expressions,
)
from attnc.plan.ir.backward import (
    Accumulate,
    Backward,
    BackwardKernel,
    Gradient,
    GradientBound,
    InMemory,
    KeptDs,
    Made,
    Preprocess,
    Prologue,
    name_of,
)
from attnc.plan.layout import BackwardLayout, KernelName, SharedBytes
from attnc.plan.lists import BLOCKS, Listing, along_lists, line_of_queries, words_of
from attnc.plan.loads import LoadNames
from attnc.plan.regions import (
    kept_by_some,
    regions,
    shows_more_past_the_end,
    tests_tiles,
    with_edges,
    with_fills,
)
from attnc.plan.selected import plan_selected_gradients
from attnc.plan.signature import are_wide, block, feature, has_descriptors, is_plain, kv_heads, several_parts
from attnc.plan.softmax import LOG2E, plan_dropout
from attnc.plan.steps import (
    IN_BOUNDS,
    dims_of,
    key_lengths,
    kv_head_of,
    make_step,
    named_bounds,
    other_axis,
    outruns,
    sequences,
    sizes,
)
from attnc.plan.steps import lengths as lengths_of
from attnc.plan.steps import program as program_of
from attnc.plan.steps import rows as rows_of
from attnc.plan.target import Target
from attnc.plan.targets import target_of

_IN_ROWS = Compare("<", Index("q_idx"), Dim("M"))

# --- one kernel


#: A load with the way its gradient is summed.
Pair: TypeAlias = tuple[WantedLoad, Accumulate]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMaker:
    """Makes the kernels of one backward. sums: names of what is summed for gradients; listing: the blocks
    that the mask lists, of which the attention's is the rest. leaves_out: whether the forward leaves keys
    out.
    """

    variant: Variant
    attention: Attention
    schedule: Schedule
    target: Target
    layout: BackwardLayout | None
    sums: frozenset[str]
    listing: Listing | None
    leaves_out: bool

    def choices(self, name: KernelName) -> tuple[BackwardConfig, ...]:
        return self.target.backward_configs(self.variant, self.schedule, name, self.layout)

    def kernel(
        self,
        inner: Axis,
        wanted: Iterable[Pair],
        makes: tuple[Made, ...],
        in_sink: Iterable[Pair] | None = None,
        *,
        stored: bool = False,
        adds_dq: InMemory | None = None,
    ) -> BackwardKernel:
        """Returns the kernel whose inner loop runs over `inner`; with `in_sink` it is the first one of its
        backward.
        """
        attention, choices, wanted = self.attention, self.choices(name_of(makes)), tuple(wanted)
        in_tile = adds_dq != "sequential"  # which walks over kv tiles up to the end
        cut = in_tile and outruns(attention, inner)
        outer_axis: Axis = "q" if inner == "kv" else "kv"
        names = LoadNames.of(attention, outer_axis if cut else None, self.sums)
        if inner == "kv":
            lengths = lengths_of(attention, names)
        else:
            lengths = key_lengths(attention, names, in_tile=in_tile)
        places = rows_of(attention, names)
        # lse is +inf for rows past the end, and what keys past the end get is not stored: only sums over keys
        # have to know where they end.
        is_ordered = attention.softmax.form == "stick_breaking"  # what a key gets depends on those behind it
        over_keys = adds_dq is not None or is_ordered or any(entry.along == ("q",) for entry, _ in wanted)
        leaves_out = self.leaves_out and adds_dq in (None, "atomic")  # others count on the mask's tiles alone
        decay = decay_of(attention, inner) if leaves_out else None
        listing = self.listing
        if listing is not None and listing.knows_full:  # the mask holds in all other blocks, too
            listing = listing if self.target.follows_lists(name_of(makes), self.layout) else None
        loops, inside = self._loops(inner, names, listing, over_keys=over_keys, outruns=cut, decay=decay)
        rule = chain_rule(attention, names, wanted, adds_dq)
        also = tuple(rule.chain.step_expressions)
        is_first = in_sink is not None and attention.normalises
        prologue = _prologue(attention, names, in_sink or (), stored=stored) if is_first else None
        softmax = Probabilities(
            scale=rule.raw_scale,
            dropout=plan_dropout(attention, names),
            form=attention.softmax.form,
        )
        kept = kept_by_some(attention.mask)
        step = make_step(
            attention,
            rule.score,
            inside,
            loops,
            softmax,
            names,
            inner,
            also,
            rule.chain.shared,
            kept=kept,
            always_fills=listing is not None and inner == "kv" and tests_tiles(loops),
        )
        outer = tuple(fetch for fetch in names.fetches if fetch.axes == other_axis(inner))
        program = program_of(names, lengths)
        at_end = () if rule.chain.factor is None else (rule.chain.factor,)
        ds = self._keep_ds(inner)
        used = (*expressions_of(program, outer, loops, step), *also, *at_end, *self._heads(inner))
        used += () if ds is None else (ds.line, ds.words)
        grid = self._grid(inner, adds_dq, longest_first=choices[0].longest_first, short_loops=loops.are_short)
        kernel = BackwardKernel(
            name=f"{attention.name}_backward_{''.join(makes) or 'rows'}",
            grid=grid,
            kv_head=kv_head_of(attention),
            dims=sizes(attention, dims_of(used), "q" if inner == "kv" else "kv"),
            program=program,
            outer=outer,
            regions=loops,
            step=step,
            softmax=softmax,
            tma=not lengths and has_descriptors(attention),
            configs=choices,
            shared=tuple(self._count_shared_bytes(config, name_of(makes)) for config in choices),
            rows=places,
            chain=rule.chain,
            makes=makes,
            prologue=prologue,
            parts=several_parts(attention),
            v_in_k=attention.v.storage.is_part,
            kept=ds,
        )
        return replace(kernel, roles=self.target.backward_roles_of(kernel, self.layout, self.variant))

    def _loops(
        self,
        inner: Axis,
        names: LoadNames,
        listing: Listing | None,
        *,
        over_keys: bool,
        outruns: bool,
        decay: Decay | None,
    ) -> tuple[Regions, Expr]:
        mask, padded = self.attention.mask, inner == "q" and not over_keys
        loops, tail = regions(mask, inner, mask.span, padded=padded, outruns=outruns, decay=decay)
        if inner == "kv":
            kept = kept_by_some(mask)
            cuts = self.target.cuts_edges and listing is None
            loops = with_edges(loops, mask, kept) if cuts else with_fills(loops, kept)
        loops = along_lists(
            loops,
            listing,
            inner,
            packs=inner == "q" and self.target.walks_for_groups and self._shares_keys,
            bits=self.target.lists_are_bits,
        )
        inside: Expr = IN_BOUNDS if tail and not padded else TRUE
        if inner == "q" and self.attention.normalises and shows_more_past_the_end(mask):
            inside = conj(inside, _IN_ROWS)
        return named_bounds(loops, names), inside

    @property
    def _shares_keys(self) -> bool:
        return kv_heads(self.attention) != Dim("H")

    def _keep_ds(self, inner: Axis) -> KeptDs | None:
        listing = self.listing
        if inner == "kv" or listing is None or not self.target.keeps_ds(self.layout):
            return None
        line = line_of_queries(listing, packs=self._shares_keys)
        return KeptDs(line=line, words=words_of(BLOCKS), block=listing.keys)

    def _heads(self, inner: Axis) -> tuple[Expr, ...]:
        """Returns how a program numbers heads; one that owns keys walks over the heads that share them."""
        walks = inner == "q" and self._shares_keys
        return (kv_head_of(self.attention), *((Dim("G"), Dim("Hkv")) if walks else ()))

    def _grid(self, inner: Axis, adds_dq: InMemory | None, *, longest_first: bool, short_loops: bool) -> Grid:
        outer: Axis = "q" if inner == "kv" else "kv"
        over: Literal["head", "q", "kv"] = "head" if inner == "q" and adds_dq == "sequential" else outer
        return Grid(
            over=over,
            persistent=False,
            longest_first=inner == "kv" and longest_first,
            sequences=sequences(self.attention, outer),
            section=None
            if over == "head"
            else self.target.backward_section(short_loops=short_loops, in_turns=adds_dq == "ordered"),
        )

    def _count_shared_bytes(self, config: BackwardConfig, name: KernelName) -> SharedBytes:
        return self.target.count_shared_bytes(self.variant, config, name, self.layout)

    def preprocess(self, in_sink: Iterable[Pair]) -> Preprocess:
        names = LoadNames.of(self.attention, taken=self.sums)
        prologue = _prologue(self.attention, names, in_sink, stored=True)
        program = program_of(names, ())
        used = [expr for item in program for expr in statement_expressions(item)]
        return Preprocess(
            name=f"{self.attention.name}_backward_preprocess",
            dims=sizes(self.attention, dims_of([*used, *(a.value for a in prologue.adjoints)])),
            program=program,
            prologue=prologue,
            sequences=sequences(self.attention),
        )


def _prologue(attention: Attention, names: LoadNames, in_sink: Iterable[Pair], *, stored: bool) -> Prologue:
    sink = attention.softmax.sink
    values = {} if sink is None else dict(derive(sink).loads)
    adjoints = tuple(
        adjoint_of(entry, names.replace(values[entry.load]), accumulate, names)
        for entry, accumulate in in_sink
    )
    shown = None if sink is None or not adjoints else scale_by(names.replace(sink), LOG2E)
    return Prologue(stored=stored, sink=shown, adjoints=adjoints)


# --- all of them


def plan_backward(
    variant: Variant, attention: Attention, schedule: Schedule, forward: OutputKernel, listing: Listing | None
) -> Backward:
    """Returns the backward of a normalised attention with gradients, given its forward kernel; the schedule
    is known to be lowerable.
    """
    if listing is not None and differentiates_selection(variant.attention, schedule):
        return plan_selected_gradients(variant, attention, schedule, forward, listing)
    default, grads = configs(schedule, "backward", variant)[0], attention.grads
    wanted = [(entry, accumulate_of(entry, default)) for entry in wanted_loads(attention)]
    in_sink, finishing, in_score = (
        [pair for pair in wanted if pair[0].reader == reader] for reader in ("sink", "epilogue", "score")
    )
    columns = [pair for pair in in_score if pair[0].along == ("kv",)]
    others = [pair for pair in in_score if pair not in columns]
    rows = [pair for pair in others if pair[0].along == ("q",) and pair[1] == "two_pass"]
    chosen = default.accumulate("q") if "q" in grads else "two_pass"
    adds_dq = None if chosen == "two_pass" else chosen
    own_dq = "q" in grads and adds_dq is None
    over_kv = adds_dq is not None or bool({"k", "v"} & set(grads)) or bool(columns)
    target = target_of(schedule.target)
    layout = target.backward_layout(variant, schedule, forward.layout)
    apart = target.has_rows_kernel
    over_q = own_dq or bool(rows) or (bool(others or in_sink) and not over_kv)
    over_q = over_q or not (is_plain(attention) or apart or not attention.normalises)
    over_q = over_q or not over_kv  # gradients that are 0 everywhere, of what conditions alone read
    over_q = over_q or attention.softmax.form == "stick_breaking"  # it sums over keys for kernels of keys
    maker = KernelMaker(
        variant=variant,
        attention=attention,
        schedule=schedule,
        target=target,
        layout=layout,
        sums=frozenset(name for entry, _ in wanted for name in names_of_sum(entry.name)),
        listing=listing,
        leaves_out=forward.bound.left_out > 0,
    )
    kernels: list[BackwardKernel] = []
    if over_q:
        first = None if apart else in_sink
        kernels.append(maker.kernel("kv", others, ("dq",) if own_dq else (), first, stored=over_kv))
    if over_kv:
        summed = columns if over_q else [*columns, *others]
        wide = are_wide(*(block(feature(t)) for t in (attention.q, attention.v)))
        if attention.v.storage.is_part:
            kernels.append(maker.kernel("q", summed, ("dk",)))
        elif adds_dq is None and target.splits_keys(layout, wide=wide):
            kernels += [maker.kernel("q", [], ("dv",)), maker.kernel("q", summed, ("dk",))]
        else:
            kernels.append(maker.kernel("q", summed, ("dk", "dv"), adds_dq=adds_dq))
    needs_rows = attention.normalises and (apart or not over_q)
    choices = [config for planned in kernels for config in planned.configs]
    tiles = [tile for config in choices for tile in (config.tile_q, config.tile_kv)]
    planned_backward = Backward(
        preprocess=maker.preprocess(in_sink) if needs_rows else None,
        kernels=tuple(kernels),
        gradients=tuple(
            Gradient(tensor=tensor, parts=tuple(e.part(a) for e, a in wanted if e.load.tensor == tensor.name))
            for tensor in attention.inputs
            if tensor.name in grads
        ),
        bound=GradientBound(
            forward=forward.bound, tile=max(tiles), min_tile=min(tiles), scale=kernels[0].chain.scale
        ),
        layout=layout,
        epilogue=plan_epilogue_gradient(attention, finishing, maker.sums),
    )
    return target.in_rounds(planned_backward, variant)


def accumulate_of(entry: WantedLoad, config: BackwardConfig) -> Accumulate:
    """Returns how a gradient is summed. That of a load with arbitrary indices is always scattered by atomic
    additions.
    """
    chosen = config.accumulate(entry.load.tensor)
    return "atomic" if entry.places is None or chosen == "atomic" else "two_pass"
