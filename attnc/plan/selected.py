"""Variant + schedule -> the kernels for gradients where every query selects keys by a list of its own.

selected_dq     a program per tile of the query heads that share a K/V head, of one query: it walks over the
                keys that its list names, and leaves delta and the base-2 lse of its rows
selected_dkdv   of blocks: a program per tile of the keys of a block, which walks over the queries whose lists
                name it, and keeps dk and dv in registers
selected_turns  of single keys, or a few: a program per tile of the keys of one list, which makes dk and dv of
                this query alone, summed over its heads, and adds them to sums in memory when the queries
                before it have. A kernel after it makes dk and dv of the sums. Of latents it multiplies p and
                ds that selected_dq keeps, of some queries at a time: both are launched in turn

selected_tokens the same, with `accumulate.dk = atomic`: as many programs as run at a time, which take query
                after query. A program makes dq, and keeps what each head gives to each key, p and ds. The
                products of these with rows of do and q, over the heads, are dv and dk of this query alone,
                and are added to sums in memory as they come

Of single keys nearly every tile has one that nearly every query selects: a walk over the queries of a tile
would do the work of all pairs. So sums of single keys are in memory, in the order of queries: gradients are
the same in every run, unless a schedule asks for atomic sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attnc.expr.construct import ZERO
from attnc.expr.nodes import TRUE, Dot
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import BackwardConfig, Schedule
from attnc.plan.decode import pack_heads, vary_heads
from attnc.plan.gradients import chain_rule
from attnc.plan.ir import Axis, Grid, Loop, OutputKernel, Probabilities, Regions, Statement, expressions_of
from attnc.plan.ir.backward import (
    Backward,
    BackwardKernel,
    Gradient,
    GradientBound,
    Made,
    Preprocess,
    Prologue,
    name_of,
)
from attnc.plan.ir.kernel import Pack
from attnc.plan.ir.lists import ListWalk
from attnc.plan.joined import joined_parts
from attnc.plan.lists import Listing, adds_as_it_comes, along_lists
from attnc.plan.loads import LoadNames
from attnc.plan.regions import LENGTH, kept_by_some, regions, with_fills
from attnc.plan.signature import kv_heads, several_parts
from attnc.plan.softmax import plan_dropout
from attnc.plan.steps import (
    IN_BOUNDS,
    dims_of,
    key_lengths,
    kv_head_of,
    lengths,
    make_step,
    named_bounds,
    other_axis,
    outruns,
    rows,
    sequences,
    sizes,
)
from attnc.plan.steps import program as program_of
from attnc.plan.target import Target
from attnc.plan.targets import target_of


def plan_selected_gradients(
    variant: Variant, attention: Attention, schedule: Schedule, forward: OutputKernel, listing: Listing
) -> Backward:
    """Returns the backward of a normalised attention whose queries select keys, given its forward kernel.
    attention: with the rest of the mask beside the list.
    """
    pack = pack_heads(attention, alone=True)
    assert pack is not None, "queries are alone in their tiles"
    maker = _SelectedMaker(
        variant=variant,
        attention=vary_heads(attention),
        schedule=schedule,
        listing=listing,
        pack=pack,
        target=target_of(schedule.target),
    )
    grads = attention.grads
    kernels: list[BackwardKernel] = []
    of_keys: tuple[Made, ...] = ("dk",) if attention.v.storage.is_part else ("dk", "dv")
    if adds_as_it_comes(variant.attention, schedule):
        kernels.append(maker.tokens(of_keys))
    else:
        kernels += maker.in_order(of_keys)
    tiles = [tile for planned in kernels for config in planned.configs for tile in _tiles(config)]
    return Backward(
        preprocess=None if kernels[0].over_q else maker.rows(attention),
        kernels=tuple(kernels),
        gradients=tuple(Gradient(tensor=x, parts=()) for x in attention.inputs if x.name in grads),
        bound=GradientBound(
            forward=forward.bound, tile=max(tiles), min_tile=min(tiles), scale=kernels[0].chain.scale
        ),
    )


def _tiles(config: BackwardConfig) -> tuple[int, int]:
    return config.tile_q, config.tile_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class _SelectedMaker:
    """Makes both kernels. attention: its heads vary along the rows of a tile."""

    variant: Variant
    attention: Attention
    schedule: Schedule
    listing: Listing
    pack: Pack
    target: Target

    def in_order(self, of_keys: tuple[Made, ...]) -> Iterator[BackwardKernel]:
        grads = set(self.attention.grads)
        wants_keys = bool({"k", "v"} & grads)
        keeps = wants_keys and self.listing.gathers and bool(joined_parts(self.attention))
        if "q" in grads or keeps or self.attention.q.storage.is_packed:  # else `rows` has a kernel of its own
            yield replace(self.queries(stored=wants_keys), keeps=keeps)
        if wants_keys:
            yield self.in_turns(of_keys) if self.listing.gathers else self.blocks(of_keys)

    def tokens(self, of_keys: tuple[Made, ...]) -> BackwardKernel:
        """Returns the kernel that makes dq, and adds what each query gives to the keys of its list."""
        kernel = self.queries(stored=bool(joined_parts(self.attention)))
        return replace(kernel, adds=of_keys, keeps=True)

    def queries(self, *, stored: bool) -> BackwardKernel:
        """Returns the kernel that makes dq. stored: another one reads what it leaves of its rows."""
        names = self._names()
        walked, line = self._walk(names)
        prologue = Prologue(stored=stored, sink=None, adjoints=())
        kernel = self._kernel(names, walked, line, ("dq",), prologue, None)
        is_joined = stored and self.listing.gathers and joined_parts(self.attention)
        return replace(kernel, joined=kernel.parts if is_joined else ())

    def blocks(self, makes: tuple[Made, ...]) -> BackwardKernel:
        """Returns the kernel that makes dk and dv of a tile of a block, over the queries that select it."""
        names = self._names()
        every = Regions(axis="q", bounds=(), loops=(Loop(start=ZERO, stop=LENGTH["q"], masked=True),))
        walked = named_bounds(along_lists(every, self.listing, "q", packs=True), names)
        return self._kernel(names, replace(walked, bounds=()), walked.bounds, makes, None, None)

    def in_turns(self, makes: tuple[Made, ...]) -> BackwardKernel:
        """Returns the kernel that adds what one query makes of the keys of its list, when it is its turn: of
        latents, products of what the kernel before it keeps.
        """
        joined = joined_parts(self.attention)
        made = replace(self, attention=self._without_weights()) if joined else self
        names = made._names()
        walked, line = made._walk(names)
        loop = Loop(start=ZERO, stop=self.pack.group, masked=True)
        loops = Regions(axis="q", bounds=(), loops=(loop,))
        kernel = made._kernel(names, loops, line, makes, None, walked.loops[0].listed)
        return replace(kernel, joined=joined)

    def _without_weights(self) -> Attention:
        """Returns the attention with nothing beside its products: p and ds are kept."""
        softmax = replace(self.attention.softmax, dropout=None, seed=None, first_head=None)
        return replace(self.attention, score=Dot(), mask=TRUE, softmax=softmax)

    def rows(self, attention: Attention) -> Preprocess:
        """Returns the kernel for delta and lse, where none makes dq: of all rows, as those that no sequence
        has saw nothing.
        """
        return Preprocess(
            name=f"{attention.name}_backward_preprocess",
            dims=sizes(attention, dims_of(())),
            program=(),
            prologue=Prologue(stored=True, sink=None, adjoints=()),
        )

    def _names(self) -> LoadNames:
        return LoadNames.of(self.attention, "q" if outruns(self.attention, "kv") else None)

    def _walk(self, names: LoadNames) -> tuple[Regions, tuple[Statement, ...]]:
        mask = self.attention.mask
        found, _ = regions(mask, "kv", mask.span, outruns=outruns(self.attention, "kv"))
        found = with_fills(found, kept_by_some(mask))
        found = named_bounds(along_lists(found, self.listing, "kv", packs=True, gathers=True), names)
        return replace(found, bounds=()), found.bounds

    def _kernel(
        self,
        names: LoadNames,
        loops: Regions,
        line: tuple[Statement, ...],
        makes: tuple[Made, ...],
        prologue: Prologue | None,
        selected: ListWalk | None,
    ) -> BackwardKernel:
        attention, inner = self.attention, loops.axis
        over: Axis = "q" if inner == "kv" else "kv"
        choices = self.target.backward_configs(self.variant, self.schedule, name_of(makes), None)
        walks_queries = inner == "q" and selected is None
        of_sequence = (
            key_lengths(attention, names, in_tile=True)
            if walks_queries and attention.q.storage.is_packed
            else lengths(attention, names, in_tile=not walks_queries)
        )
        places = rows(attention, names)
        rule = chain_rule(attention, names, ())
        dropout = plan_dropout(attention, names)
        softmax = Probabilities(scale=rule.raw_scale, dropout=dropout, form=attention.softmax.form)
        also = tuple(rule.chain.step_expressions)
        kept = kept_by_some(attention.mask)
        step = make_step(
            attention, rule.score, IN_BOUNDS, loops, softmax, names, inner, also, rule.chain.shared, kept=kept
        )
        outer = tuple(fetch for fetch in names.fetches if fetch.axes == other_axis(inner))
        own = {item.name for item in line}
        program = tuple(item for item in program_of(names, of_sequence) if item.name not in own)
        kv_head = kv_head_of(attention)
        listed = () if selected is None else (selected.line, selected.stride)
        used = (*expressions_of((*program, *line), outer, loops, step), *also, *listed)
        heads = (kv_head, kv_heads(attention), self.pack.group)
        return BackwardKernel(
            name=f"{attention.name}_backward_{''.join(makes)}",
            grid=Grid(over=over, persistent=False, longest_first=False, sequences=sequences(attention, over)),
            kv_head=kv_head,
            dims=sizes(attention, dims_of((*used, *heads)), over),
            program=(*program, *line),
            outer=outer,
            regions=loops,
            step=step,
            softmax=softmax,
            tma=False,
            configs=choices,
            shared=tuple(
                self.target.count_shared_bytes(self.variant, config, name_of(makes), None)
                for config in choices
            ),
            rows=places,
            chain=rule.chain,
            makes=makes,
            prologue=prologue,
            parts=several_parts(attention),
            v_in_k=attention.v.storage.is_part,
            pack=self.pack,
            selected=selected,
        )
