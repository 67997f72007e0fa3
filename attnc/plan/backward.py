"""Variant + schedule -> the backward kernels: FlashAttention-2 (arXiv 2307.08691), algorithm 2.

backward_dq     a program per q tile, with the forward's loops: dq in registers, hence without atomics. It
                comes first, and leaves delta = rowsum(do * o) and the base-2 lse of its rows for
backward_dkdv   a program per kv tile: dk and dv in registers, the inner loop over the q tiles that see it
                (the forward's regions, transposed), for each of the query heads that share it

Both compute the scores: seven dots where one kernel would need five, yet on Hopper they are faster than
adding dq to memory. Where the accumulators of dk and dv do not fit a kernel, each has its own. With
`accumulate.dq = atomic` a small kernel makes the rows, the second one adds to a f32 dq, and the first is left
out; with `sequential` one program for each head walks over all kv tiles, so that nothing is added at the same
time (FlashAttention-1, arXiv 2205.14135, algorithm 4).
"""

from __future__ import annotations

from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.schedule import BackwardConfig, Schedule
from attnc.plan.backward_kernel import KernelMaker
from attnc.plan.columns import are_wide, block, feature
from attnc.plan.gradients import Wanted, wanted_loads
from attnc.plan.ir import OutputKernel
from attnc.plan.ir.backward import (
    Accumulate,
    Backward,
    BackwardKernel,
    Gradient,
    GradientBound,
)
from attnc.plan.storage import is_plain
from attnc.plan.targets import target_of


def plan_backward(
    variant: Variant, attention: Attention, schedule: Schedule, forward: OutputKernel
) -> Backward:
    """The backward of a normalised attention with gradients, given its forward kernel; the schedule is known
    to be lowerable.
    """
    default, grads = configs(schedule, "backward", variant)[0], attention.grads
    wanted = [(entry, accumulate_of(entry, default)) for entry in wanted_loads(attention)]
    in_sink = [pair for pair in wanted if pair[0].in_sink]
    columns = [pair for pair in wanted if pair[0].along == ("kv",)]
    others = [pair for pair in wanted if pair not in in_sink and pair not in columns]
    rows = [pair for pair in others if pair[0].along == ("q",) and pair[1] == "two_pass"]
    chosen = default.accumulate("q") if "q" in grads else "two_pass"
    adds_dq = None if chosen == "two_pass" else chosen
    own_dq = "q" in grads and adds_dq is None
    over_kv = adds_dq is not None or bool({"k", "v"} & set(grads)) or bool(columns)
    target = target_of(schedule.target)
    layout = target.backward_layout(variant, schedule, forward.layout)
    apart = target.has_rows_kernel
    over_q = own_dq or bool(rows) or (bool(others or in_sink) and not over_kv)
    over_q = over_q or not (is_plain(attention) or apart)
    over_q = over_q or not over_kv  # gradients that are 0 everywhere, of what conditions alone read
    maker = KernelMaker(variant=variant, attention=attention, schedule=schedule, target=target, layout=layout)
    kernels: list[BackwardKernel] = []
    if over_q:
        first = None if apart else in_sink
        kernels.append(maker.kernel("kv", others, ("dq",) if own_dq else (), first, stored=over_kv))
    if over_kv:
        summed = columns if over_q else [*columns, *others]
        wide = are_wide(*(block(feature(t)) for t in (attention.q, attention.v)))
        if adds_dq is None and target.splits_keys(layout, wide=wide):
            kernels += [maker.kernel("q", [], ("dv",)), maker.kernel("q", summed, ("dk",))]
        else:
            kernels.append(maker.kernel("q", summed, ("dk", "dv"), adds_dq=adds_dq))
    choices = [config for planned in kernels for config in planned.configs]
    tiles = [tile for config in choices for tile in (config.tile_q, config.tile_kv)]
    return Backward(
        preprocess=None if over_q and not apart else maker.preprocess(in_sink),
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
    )


def accumulate_of(entry: Wanted, config: BackwardConfig) -> Accumulate:
    """A load that points anywhere can only be scattered, whatever its neighbours do."""
    chosen = config.accumulate(entry.load.tensor)
    return "atomic" if entry.places is None or chosen == "atomic" else "two_pass"
