"""Variant + schedule -> the forward kernel, for both loop orders.

forward_q_kv   FlashAttention-2 (arXiv 2307.08691), algorithm 1: a program per q tile, inner loop over kv
tiles
forward_kv_q   FlashAttention-1 (arXiv 2205.14135), algorithm 1: outer loop over kv tiles; o, l, m go through
memory each step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from attnc.expr.nodes import TRUE, Binary, Compare, Const, Dim, Dot, Expr, Index, Load, Ref, Search, walk
from attnc.expr.scale import scale_by
from attnc.expr.simplify import conj, minimum, substitute
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.schedule import Choice, Config, Schedule
from attnc.model.tensors import Dense
from attnc.plan.error_bound import error_bound
from attnc.plan.ir import Axis, Dropout, Fetch, Grid, Kernel, Let, Regions, Row, Softmax, Statement, Step
from attnc.plan.loads import LoadNames
from attnc.plan.regions import regions
from attnc.plan.resources import portable, shared_memory
from attnc.plan.scores import LOG2E, split_scale
from attnc.plan.signature import kv_heads

IN_BOUNDS = Compare("<", Index("kv_idx"), Dim("N"))
TILE_ENDS = frozenset({"q_lo", "q_hi", "kv_lo", "kv_hi", "first_pos", "last_pos"})
_ENDS = tuple(
    Let(name=name, value=Binary("-", Binary("+", Index(end), Dim("N")), Dim("M")))
    for name, end in (("first_pos", "q_lo"), ("last_pos", "q_hi"))
)


def plan_forward(variant: Variant, attention: Attention, schedule: Schedule) -> Kernel:
    """The forward kernel of a normalised attention (`signature.normalise`); the schedule is known to be
    lowerable.
    """
    choices = portable(configs(schedule, "forward", variant), variant, schedule)
    default = choices[0]
    inner: Axis = "kv" if default["loops"] == ("q", "kv") else "q"
    names = LoadNames()
    lengths = _lengths(attention, names)
    loops, tail = regions(attention.mask, inner, attention.mask.span)
    loops = _named(loops, names)
    softmax, score = _softmax(attention, default, names)
    step = _step(attention, score, tail, loops, softmax, names, inner)
    outer = tuple(fetch for fetch in names.fetches if fetch.axes and fetch.axes == _other(inner))
    scalars = (fetch for fetch in names.fetches if not fetch.axes and not _at_tile_ends(fetch))
    program: tuple[Statement, ...] = (*names.rows.values(), *scalars, *lengths)
    kv_head = _kv_head(attention)
    return Kernel(
        name=f"{attention.name}_forward",
        structure="forward_q_kv" if inner == "kv" else "forward_kv_q",
        grid=Grid(
            over="q" if inner == "kv" else "head",
            persistent=default["persistent"] is True,
            longest_first=default["order"] == "longest_first",
        ),
        kv_head=kv_head,
        dims=_dims((*_expressions(program, outer, loops, step, softmax), kv_head)),
        program=program,
        outer=outer,
        regions=loops,
        step=step,
        softmax=softmax,
        tma=not lengths and all(isinstance(t.storage, Dense) for t in (attention.k, attention.v)),
        configs=choices,
        shared=tuple(shared_memory(config, variant) for config in choices),
        bound=error_bound(attention, choices, softmax),
    )


def _lengths(attention: Attention, names: LoadNames) -> tuple[Let, ...]:
    """`length N = kv_len[b]` shortens the sequence at hand; it can never make it longer than its tensor."""
    return tuple(
        Let(name=dim, value=minimum(names.replace(value), Dim(dim)), comment=f"length {dim}", span=value.span)
        for dim, value in attention.lengths.items()
    )


def _named(loops: Regions, names: LoadNames) -> Regions:
    """The loops with everything that their bounds share named: the tile's end positions, its loads, its
    searches.
    """
    lets = [let for let in loops.bounds if isinstance(let, Let)]
    exprs = [*(let.value for let in lets), *(expr for loop in loops.loops for expr in loop.expressions)]
    ends = [end for end in _ENDS if any(end.value in walk(expr) for expr in exprs)]
    mapping: dict[Expr, Expr] = {end.value: Ref(end.name, "int") for end in ends}
    searches: dict[Expr, Let] = {}

    def name(expr: Expr) -> Expr:
        expr = names.replace(substitute(expr, mapping))
        for node in walk(expr):
            if isinstance(node, Search) and node not in searches:
                row = names.row(node.tensor, (*node.prefix, node.value))
                side = "from" if node.side == "lower" else "to"
                found = Let(
                    name=names.free_name(f"{node.tensor}_{side}"),
                    value=replace(node, row=row.name if row else None),
                )
                searches[node] = found
        return substitute(expr, {node: Ref(let.name, "int", natural=True) for node, let in searches.items()})

    bounds = [replace(let, value=name(let.value)) for let in lets]
    tiles = tuple(loop.rewritten(name) for loop in loops.loops)
    fetches = (fetch for fetch in names.fetches if _at_tile_ends(fetch))
    return replace(loops, bounds=(*ends, *fetches, *searches.values(), *bounds), loops=tiles)


def _softmax(attention: Attention, config: Config, names: LoadNames) -> tuple[Softmax, Expr | None]:
    """The softmax, and the score it reads (None: the raw dot product)."""
    scale, raw = split_scale(attention.score)
    choice = config["softmax"]
    rescale = choice.args.get("rescale", "deferred") if isinstance(choice, Choice) else "deferred"
    threshold = 0.0
    if isinstance(rescale, Choice):
        (value,) = rescale.args.values()
        rescale, threshold = rescale.name, value if isinstance(value, int | float) else 0.0
    wanted = attention.softmax
    dropout = None
    if wanted.dropout is not None and wanted.seed is not None:
        dropout = Dropout(p=names.replace(wanted.dropout), seed=names.replace(wanted.seed))
    softmax = Softmax(
        kind="two_pass" if "two_pass" in (choice, getattr(choice, "name", "")) else "online",
        rescale=rescale,  # type: ignore[arg-type]  # one of the three names, by the schedule's rules
        threshold=float(threshold),
        scale=scale,
        safe_everywhere=any(isinstance(node, Load) and node.type == "float" for node in walk(raw)),
        sink=None if wanted.sink is None else scale_by(names.replace(wanted.sink), LOG2E),
        dropout=dropout,
    )
    return softmax, None if isinstance(raw, Dot) else names.replace(raw)


def _step(
    attention: Attention,
    score: Expr | None,
    tail: bool,
    loops: Regions,
    softmax: Softmax,
    names: LoadNames,
    inner: Axis,
) -> Step:
    in_score = _in_step(names, inner)
    keep = None
    if any(loop.masked is not False for loop in loops.loops):
        mask = names.replace(attention.mask)
        keep = conj(IN_BOUNDS, mask) if tail else mask
        keep = None if keep == TRUE else keep
    masked = tuple(fetch for fetch in _in_step(names, inner) if fetch not in in_score)
    everywhere = (*_fetch_expressions(in_score), *(() if score is None else (score,)))
    under_mask = (*_fetch_expressions(masked), *(() if keep is None else (keep,)))
    drawn = (
        ()
        if softmax.dropout is None
        else (softmax.dropout.p, softmax.dropout.seed, Index("b"), Index("h"), Index("q_idx"))
    )
    used = _names((*everywhere, *under_mask, *drawn), defined={f.name for f in (*in_score, *masked)})
    pointers = tuple(name for fetch in (*in_score, *masked) for name in pointer_names(fetch))
    return Step(
        fetches=in_score,
        masked_fetches=masked,
        score=score,
        keep=keep,
        uses_kv_idx=any(Index("kv_idx") in walk(expr) for expr in everywhere),
        names=tuple(dict.fromkeys((*used, *pointers))),
        score_span=attention.score.span,
        keep_span=attention.mask.span,
    )


def pointer_names(fetch: Fetch) -> tuple[str, ...]:
    """Names that the load addresses through."""
    tensor, row = fetch.load.tensor, fetch.row
    done = 0 if row is None else len(row.indices)
    strides = (f"stride_{tensor}_{axis}" for axis in range(done, len(fetch.load.indices)))
    return (f"{tensor}_ptr" if row is None else row.name, *strides)


def _in_step(names: LoadNames, inner: Axis) -> tuple[Fetch, ...]:
    return tuple(fetch for fetch in names.fetches if inner in fetch.axes)


def _other(axis: Axis) -> tuple[Axis, ...]:
    return ("q",) if axis == "kv" else ("kv",)


def _at_tile_ends(fetch: Fetch) -> bool:
    return any(
        isinstance(node, Index | Ref) and node.name in TILE_ENDS
        for expr in _fetch_expressions((fetch,))
        for node in walk(expr)
    )


def _fetch_expressions(fetches: Iterable[Fetch]) -> tuple[Expr, ...]:
    return tuple(expr for fetch in fetches for expr in (*fetch.load.indices, fetch.guard))


def _names(expressions: Iterable[Expr], defined: set[str]) -> Iterator[str]:
    """Names that expressions take from around them; the step itself has kv_idx and its own loads."""
    for kind in (Index, Dim, Ref):
        for expr in expressions:
            for node in walk(expr):
                if isinstance(node, kind) and node.name != "kv_idx" and node.name not in defined:
                    yield node.name


def _kv_head(attention: Attention) -> Expr:
    match kv_heads(attention):
        case Dim(name="H"):
            return Index("h")
        case Const(value=1):
            return Const(0)
        case _:
            return Binary("//", Index("h"), Dim("G"))


def _expressions(
    program: tuple[Statement, ...], outer: tuple[Fetch, ...], loops: Regions, step: Step, softmax: Softmax
) -> Iterator[Expr]:
    for statement in (*program, *outer, *loops.bounds, *step.fetches, *step.masked_fetches):
        match statement:
            case Let(value=value):
                yield value
            case Row(indices=indices):
                yield from indices
            case Fetch():
                yield from _fetch_expressions((statement,))
    for loop in loops.loops:
        yield from loop.expressions
    for expr in (step.score, step.keep, softmax.sink):
        if expr is not None:
            yield expr


def _dims(expressions: Iterable[Expr]) -> tuple[str, ...]:
    """Run-time sizes the kernel takes: B, H, M, N always, others where an expression reads them."""
    used = {node.name for expr in expressions for node in walk(expr) if isinstance(node, Dim)}
    first = ("B", "H", "G", "M", "N")
    kept = tuple(name for name in first if name != "G" or "G" in used)
    return (*kept, *sorted(used - set(first) - {"BLOCK_M", "BLOCK_N"}))
