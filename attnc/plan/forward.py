"""Variant + schedule -> the forward kernel, for both loop orders.

forward_q_kv   FlashAttention-2 (arXiv 2307.08691), algorithm 1: a program per q tile, inner loop over kv
tiles
forward_kv_q   FlashAttention-1 (arXiv 2205.14135), algorithm 1: outer loop over kv tiles; o, l, m go through
memory each step
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.expr.nodes import TRUE, Expr
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Schedule
from attnc.plan.columns import plan_column_scales
from attnc.plan.decay import Decay, decay_of
from attnc.plan.epilogue import plan_epilogue
from attnc.plan.error_bound import error_bound
from attnc.plan.ir import Axis, Forward, Grid, expressions_of
from attnc.plan.ir.kernel import Regions
from attnc.plan.lists import Listing, along_lists
from attnc.plan.loads import LoadNames
from attnc.plan.regions import kept_by_some, regions, segments_of, tests_tiles, with_edges, with_fills
from attnc.plan.signature import has_descriptors, several_parts
from attnc.plan.softmax import plan_key_scale, plan_softmax
from attnc.plan.steps import (
    IN_BOUNDS,
    count_stored_rows,
    dims_of,
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


def plan_forward(
    variant: Variant, attention: Attention, schedule: Schedule, listing: Listing | None
) -> Forward:
    """Returns the forward kernel of a normalised attention (`signature.normalise`); the schedule is known to
    be lowerable. listing: the blocks that the mask lists, of which it is the rest.
    """
    target = target_of(schedule.target)
    choices = target.configs(variant, schedule)
    default = choices[0]
    layout = target.layout(variant, schedule, default)
    inner: Axis = "kv" if default.loops == ("q", "kv") else "q"
    cut = inner == "kv" and outruns(attention, inner)  # a loop over kv tiles ends with the sequence
    names = LoadNames.of(attention, "q" if cut else None)
    places = rows(attention, names)
    lines = lengths(attention, names, in_tile=inner == "kv")
    walk = _walk_tiles(attention, target, listing, inner, outruns=cut)
    loops, decay = named_bounds(walk.loops, names), walk.decay
    softmax, score = plan_softmax(attention, default, names)
    v_scale = plan_key_scale(attention, names)
    step = make_step(
        attention,
        score,
        IN_BOUNDS if walk.tail else TRUE,
        loops,
        softmax,
        names,
        inner,
        kept=walk.kept,
        always_fills=listing is not None and tests_tiles(loops) and target.always_fills,
        v_scale=v_scale,
        scales=plan_column_scales(attention, names),
    )
    epilogue = plan_epilogue(attention, names)
    outer = tuple(fetch for fetch in names.fetches if fetch.axes and fetch.axes == other_axis(inner))
    program = program_of(names, lines)
    kv_head = kv_head_of(attention)
    finishing = () if epilogue is None else epilogue.expressions
    listed = () if listing is None else listing.condition.extents
    used = (*expressions_of(program, outer, loops, step), *softmax.expressions, *finishing, *listed, kv_head)
    kernel = Forward(
        name=f"{attention.name}_forward",
        grid=Grid(
            over="q" if inner == "kv" else "head",
            persistent=default.persistent,
            longest_first=default.longest_first,
            sequences=sequences(attention),
            section=target.section() if inner == "kv" else None,
        ),
        kv_head=kv_head,
        dims=sizes(attention, dims_of(used)),
        program=program,
        outer=outer,
        regions=loops,
        step=step,
        softmax=softmax,
        tma=not lines and has_descriptors(attention),
        parts=several_parts(attention) if inner == "kv" else (),
        configs=choices,
        shared=tuple(target.count_shared_bytes(variant, config, "forward", layout) for config in choices),
        layout=layout,
        bound=error_bound(
            attention,
            choices,
            softmax,
            left_out=0.0 if decay is None else decay.share,
            cuts_summands=target.cuts_summands,
            **target.columns(choices, layout),
        ),
        rows=places,
        stored=count_stored_rows(attention),
        epilogue=epilogue,
        segments=segments_of(attention, loops),
    )
    return replace(kernel, roles=target.roles_of(kernel, variant))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopWalk:
    """The loops over tiles. tail: whether partial tiles test the length of the sequence; kept: the keys that
    some query keeps; decay: how far weights fall before they are left out.
    """

    loops: Regions
    tail: bool
    kept: Expr | None
    decay: Decay | None


def _walk_tiles(
    attention: Attention, target: Target, listing: Listing | None, inner: Axis, *, outruns: bool
) -> _LoopWalk:
    forgets = inner == "kv" and listing is None and attention.segment is None
    decay = decay_of(attention, inner) if forgets else None
    loops, tail = regions(attention.mask, inner, attention.mask.span, outruns=outruns, decay=decay)
    kept = kept_by_some(attention.mask)
    if inner == "kv":
        cuts = target.cuts_edges and listing is None
        loops = with_edges(loops, attention.mask, kept) if cuts else with_fills(loops, kept)
    loops = along_lists(loops, listing, inner, bits=target.lists_are_bits)
    return _LoopWalk(loops=loops, tail=tail, kept=kept, decay=decay)
