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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from attnc.expr.derive import derive
from attnc.expr.nodes import TRUE, Dim, Load, walk
from attnc.expr.scale import scale_by
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.schedule import Config, Schedule
from attnc.plan.cuda_backward import cuda_choices, plan_cuda_backward
from attnc.plan.cuda_backward_layout import CudaBackward
from attnc.plan.error_bound import error_bound, feature
from attnc.plan.gradients import ChainRule, Wanted, adjoint_of, chain_rule, wanted_loads
from attnc.plan.ir import Axis, Dropout, Grid, Kernel, Softmax
from attnc.plan.ir_backward import (
    Accumulate,
    Backward,
    BackwardKernel,
    Gradient,
    GradientBound,
    InMemory,
    KernelName,
    Made,
    Preprocess,
    Prologue,
    name_of,
)
from attnc.plan.loads import LoadNames
from attnc.plan.regions import regions
from attnc.plan.resources import are_wide, shared_memory, tile_width
from attnc.plan.scores import LOG2E
from attnc.plan.sequence import key_lengths, sequences, sizes
from attnc.plan.sequence import lengths as lengths_of
from attnc.plan.sequence import program as program_of
from attnc.plan.sequence import rows as rows_of
from attnc.plan.signature import kv_heads
from attnc.plan.steps import (
    IN_BOUNDS,
    dims_of,
    expressions_of,
    kv_head_of,
    make_step,
    named_bounds,
    other_axis,
    statement_expressions,
)
from attnc.plan.storage import is_plain
from attnc.plan.triton_configs import triton_configs

#: A load with the way its gradient is summed.
Pair: TypeAlias = tuple[Wanted, Accumulate]
#: What `accumulate.dq` may say.
_IN_MEMORY: dict[str, InMemory] = {"atomic": "atomic", "sequential": "sequential"}


def plan_backward(variant: Variant, attention: Attention, schedule: Schedule, forward: Kernel) -> Backward:
    """The backward of a normalised attention with gradients, given its forward kernel; the schedule is known
    to be lowerable.
    """
    default, grads = configs(schedule, "backward", variant)[0], attention.grads
    wanted = [(entry, accumulate_of(entry, default)) for entry in wanted_loads(attention)]
    in_sink = [pair for pair in wanted if pair[0].in_sink]
    columns = [pair for pair in wanted if pair[0].along == ("kv",)]
    others = [pair for pair in wanted if pair not in in_sink and pair not in columns]
    rows = [pair for pair in others if pair[0].along == ("q",) and pair[1] == "two_pass"]
    adds_dq = _IN_MEMORY.get(str(default["accumulate.dq"])) if "q" in grads else None
    own_dq = "q" in grads and adds_dq is None
    over_kv = adds_dq is not None or bool({"k", "v"} & set(grads)) or bool(columns)
    cuda = None if forward.cuda is None else plan_cuda_backward(variant, schedule, forward.cuda)
    apart = cuda is not None  # the rows have a kernel of their own
    over_q = own_dq or bool(rows) or (bool(others or in_sink) and not over_kv)
    over_q = over_q or not (is_plain(attention) or apart)
    maker = _Maker(variant=variant, attention=attention, schedule=schedule, cuda=cuda)
    kernels: list[BackwardKernel] = []
    if over_q:
        first = None if apart else in_sink
        kernels.append(maker.kernel("kv", others, ("dq",) if own_dq else (), first, stored=over_kv))
    if over_kv:
        summed = columns if over_q else [*columns, *others]
        wide = are_wide(*(tile_width(feature(t)) for t in (attention.q, attention.v)))
        if adds_dq is None and wide and not apart:
            kernels += [maker.kernel("q", [], ("dv",)), maker.kernel("q", summed, ("dk",))]
        else:
            kernels.append(maker.kernel("q", summed, ("dk", "dv"), adds_dq=adds_dq))
    choices = [config for planned in kernels for config in planned.kernel.configs]
    tiles = [config.number(key) for config in choices for key in ("tile.q", "tile.kv")]
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
        cuda=cuda,
    )


def accumulate_of(entry: Wanted, config: Config) -> Accumulate:
    """A load that points anywhere can only be scattered, whatever its neighbours do."""
    chosen = config[f"accumulate.d{entry.load.tensor}"]
    return "atomic" if entry.places is None or chosen == "atomic" else "two_pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Makes the kernels of one backward."""

    variant: Variant
    attention: Attention
    schedule: Schedule
    cuda: CudaBackward | None = None

    def choices(self, name: KernelName) -> tuple[Config, ...]:
        """The configs of one kernel that run on some device."""
        if self.cuda is not None:
            return cuda_choices(self.cuda, self.variant, self.schedule, name)
        return triton_configs(self.variant, self.schedule, name)

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
        """The kernel whose inner loop runs over `inner`; with `in_sink` it is the first one of its
        backward.
        """
        attention, choices = self.attention, self.choices(name_of(makes))
        names = LoadNames()
        lengths = lengths_of(attention, names) if inner == "kv" else key_lengths(attention, names)
        places = rows_of(attention, names)
        outer_axis: Axis = "q" if inner == "kv" else "kv"
        wanted = tuple(wanted)
        # lse is +inf for rows past the end, and what keys past the end get is not stored: only sums over keys
        # have to know where they end.
        over_keys = adds_dq is not None or any(entry.along == ("q",) for entry, _ in wanted)
        loops, tail = regions(
            attention.mask, inner, attention.mask.span, padded=inner == "q" and not over_keys
        )
        loops = named_bounds(loops, names)
        rule = chain_rule(attention, names, wanted, adds_dq)
        also = tuple(rule.chain.step_expressions)
        prologue = None if in_sink is None else _prologue(attention, names, in_sink, stored=stored)
        softmax = _softmax(rule, _dropout(attention, names), attention)
        inside = IN_BOUNDS if tail and (inner == "kv" or over_keys) else TRUE
        step = make_step(attention, rule.score, inside, loops, softmax, names, inner, also, rule.chain.shared)
        outer = tuple(fetch for fetch in names.fetches if fetch.axes == other_axis(inner))
        program = program_of(names, lengths)
        kv_head = kv_head_of(attention)
        used = [*expressions_of(program, outer, loops, step, softmax), *also, kv_head]
        if inner == "q" and kv_heads(attention) != Dim("H"):
            used += [Dim("G"), Dim("Hkv")]
        return BackwardKernel(
            kernel=Kernel(
                name=f"{attention.name}_backward_{''.join(makes) or 'rows'}",
                structure="backward_dkdv" if inner == "q" else "backward_dq",
                grid=Grid(
                    over="q" if inner == "kv" else "head" if adds_dq == "sequential" else "kv",
                    persistent=False,
                    longest_first=inner == "kv" and choices[0]["order"] == "longest_first",
                    sequences=sequences(attention, outer_axis),
                ),
                kv_head=kv_head,
                dims=sizes(attention, dims_of(used), outer_axis),
                program=program,
                outer=outer,
                regions=loops,
                step=step,
                softmax=softmax,
                tma=not lengths and is_plain(attention),
                configs=choices,
                shared=tuple(self._shared(config, name_of(makes)) for config in choices),
                bound=error_bound(attention, choices, softmax, on_cuda=self.cuda is not None),
                rows=places,
            ),
            chain=rule.chain,
            makes=makes,
            prologue=prologue,
        )

    def _shared(self, config: Config, name: KernelName) -> int:
        if self.cuda is None:
            return shared_memory(config, self.variant, name)
        return sum(self.cuda.shared_memory(config, name).values())

    def preprocess(self, in_sink: Iterable[Pair]) -> Preprocess:
        names = LoadNames()
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


def _dropout(attention: Attention, names: LoadNames) -> Dropout | None:
    wanted = attention.softmax
    if wanted.dropout is None or wanted.seed is None:
        return None
    return Dropout(p=names.replace(wanted.dropout), seed=names.replace(wanted.seed))


def _softmax(rule: ChainRule, dropout: Dropout | None, attention: Attention) -> Softmax:
    """P is exp(score - lse): there is no running maximum, and the sink is in lse already."""
    return Softmax(
        kind="online",
        rescale="deferred",
        threshold=0.0,
        scale=rule.raw_scale,
        safe_everywhere=any(
            isinstance(node, Load) and node.type == "float" for node in walk(attention.score)
        ),
        sink=None,
        dropout=dropout,
    )
