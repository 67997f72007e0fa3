"""What kernels of every phase are made of: named loop bounds, the step of one tile, sizes and heads, the
lengths of the sequence at hand and where its rows lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from attnc.expr.construct import conj, minimum
from attnc.expr.interval import I32, SIZE
from attnc.expr.nodes import TRUE, Binary, Call, Compare, Const, Dim, Expr, Index, Load, Ref, Search, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Ragged, Role
from attnc.plan.access import Rows, Sequences
from attnc.plan.ir import (
    Axis,
    Fetch,
    Kernel,
    Let,
    Probabilities,
    Regions,
    Row,
    Statement,
    Step,
    fetch_expressions,
    statement_expressions,
)
from attnc.plan.ir.kernel import KEY_ROW, TILE_COLUMN, ColumnScale
from attnc.plan.loads import LoadNames
from attnc.plan.names import own_name
from attnc.plan.regions import before_the_end
from attnc.plan.signature import kv_heads, normalise
from attnc.plan.width import ends_of, narrow_bound

IN_BOUNDS = Compare("<", Index("kv_idx"), Dim("N"))
_ENDS = tuple(
    Let(name=name, value=Binary("-", Binary("+", Index(end), Dim("N")), Dim("M")))
    for name, end in (("first_pos", "q_lo"), ("last_pos", "q_hi"))
)


def shortened_lengths(attention: Attention, names: LoadNames) -> tuple[Statement, ...]:
    """Returns the statements of `length N = kv_len[b]` for the program's sequence: it shortens it, and can
    never make it longer than its tensor.

    Each after what it loads, whose tensors end where a length before it does.
    """
    statements: list[Statement] = [*names.fetches]
    for dim, value in attention.lengths.items():
        known = len(names.fetches)
        shortest = narrow_bound(minimum(names.replace(value), Dim(dim)), Dim(dim))
        loaded = names.fetches[known:]
        statements += [*loaded, Let(name=dim, value=shortest, comment=f"length {dim}", span=value.span)]
    return tuple(statements)


def named_bounds(loops: Regions, names: LoadNames) -> Regions:
    """Returns the loops with everything that their bounds share named: the tile's end positions, its loads,
    its searches.
    """
    lets = [let for let in loops.bounds if isinstance(let, Let)]
    exprs = [*(let.value for let in lets), *(expr for loop in loops.loops for expr in loop.expressions)]
    known = _ENDS if loops.axis == "kv" else ()  # an inner q tile has no ends yet
    ends = [end for end in known if any(end.value in walk(expr) for expr in exprs)]
    mapping: dict[Expr, Expr] = {end.value: Ref(end.name, "int", within=ends_of(end.value)) for end in ends}
    searches: dict[Expr, Let] = {}

    def name(expr: Expr) -> Expr:
        expr = names.replace(substitute(expr, mapping))
        for node in walk(expr):
            if isinstance(node, Search) and node not in searches:
                row = names.row(node.tensor, (*node.prefix, Index("kv_idx")))  # or any other along its axis
                side = "from" if node.side == "lower" else "to"
                found = Let(
                    name=names.free_name(own_name(f"{node.tensor}_{side}")),
                    value=node if row is None else replace(node, row=row.name, done=len(row.indices)),
                )
                searches[node] = found
        found_at: dict[Expr, Expr] = {
            node: Ref(let.name, "int", natural=True, within=ends_of(node)) for node, let in searches.items()
        }
        return substitute(expr, found_at)

    bounds = [replace(let, value=name(let.value)) for let in lets]
    tiles = [loop.rewrite(name) for loop in loops.loops]
    statements: tuple[Statement, ...] = (*ends, *names.fetches, *searches.values(), *bounds)
    tile = tile_axes(statements)
    kept = [item for item in statements if not isinstance(item, Fetch) or (tile[item.name] and not item.axes)]
    return replace(
        loops,
        bounds=tuple(item for item in kept if loops.axis not in tile[item.name]),
        loops=tuple(
            replace(loop, tests=_read_by(loop.guard, [x for x in kept if loops.axis in tile[x.name]]))
            for loop in tiles
        ),
    )


def tile_axes(statements: Iterable[Statement]) -> dict[str, frozenset[str]]:
    """Returns the axes whose tile a value is of, by its name: it reads where the tile begins or ends, itself
    or through a value before it. That is what decides where it can be computed.
    """
    found = {end.name: frozenset({"q"}) for end in _ENDS}
    for item in statements:
        nodes = (node for expr in statement_expressions(item) for node in walk(expr))
        axes: set[str] = set()
        for node in nodes:
            match node:
                case Index(name="q_lo" | "q_hi"):
                    axes.add("q")
                case Index(name="kv_lo" | "kv_hi"):
                    axes.add("kv")
                case Ref(name=name):
                    axes |= found.get(name, frozenset())
        found[item.name] = frozenset(axes)
    return found


def _read_by(guard: Expr | None, statements: Sequence[Statement]) -> tuple[Statement, ...]:
    used = set() if guard is None else {node.name for node in walk(guard) if isinstance(node, Ref)}
    kept: list[Statement] = []
    for item in reversed(statements):
        if item.name in used:
            kept.append(item)
            nodes = (node for expr in statement_expressions(item) for node in walk(expr))
            used |= {node.name for node in nodes if isinstance(node, Ref)}
    return tuple(reversed(kept))


def make_step(
    attention: Attention,
    score: Expr | None,
    inside: Expr,
    loops: Regions,
    softmax: Probabilities,
    names: LoadNames,
    inner: Axis,
    also: tuple[Expr, ...] = (),
    lets: tuple[Let, ...] = (),
    *,
    kept: Expr | None,
    always_fills: bool = False,
    v_scale: Expr | None = None,
    scales: tuple[ColumnScale, ...] = (),
) -> Step:
    """Returns the step of a kernel whose inner loop runs over `inner`.

    score: with its loads named, None for the raw dot product; inside: what a partial tile must test besides
    the mask; also: expressions that every step evaluates besides the score; lets: values that it names
    itself. kept: as in `ir.Step`, evaluated by steps whose inner loop runs over keys, and not only by those
    that test the mask if it `always_fills`. v_scale, scales: as in `ir.Step`, their loads
    named.
    """
    partial = any(loop.masked is not False for loop in loops.loops)
    kept = kept if partial else None  # without a partial tile the mask excludes nothing
    kept_inside = kept
    if kept is not None and inner == "kv":
        kept_inside = before_the_end(attention.mask, kept)
    if kept is not None and always_fills:
        also = (*also, kept := names.replace(kept))
    in_score = _in_step(names, inner)
    keep = None
    if partial:
        mask = names.replace(attention.mask)
        keep = conj(inside, mask)
        keep = None if keep == TRUE else keep
    kept = None if kept is None else names.replace(kept)
    kept_inside = None if kept_inside is None else names.replace(kept_inside)
    masked = tuple(fetch for fetch in _in_step(names, inner) if fetch not in in_score)
    also = also if v_scale is None else (*also, v_scale)
    loads = tuple(fetch for scale in scales for fetch in scale.fetches)
    also = (*also, *fetch_expressions(loads), *(scale.value for scale in scales))
    everywhere = (*fetch_expressions(in_score), *(() if score is None else (score,)), *also)
    here = (keep, kept if inner == "kv" else None)
    under_mask = (*fetch_expressions(masked), *(expr for expr in here if expr is not None))
    drawn = (
        ()
        if softmax.dropout is None
        else (softmax.dropout.p, softmax.dropout.seed, softmax.dropout.head, Index("b"), Index("q_idx"))
    )
    own = {fetch.name for fetch in (*in_score, *masked, *loads)} | {let.name for let in lets}
    own |= {KEY_ROW.name, TILE_COLUMN.name}
    used = _names((*everywhere, *under_mask, *drawn), defined=own)
    pointers = tuple(name for fetch in (*in_score, *masked, *loads) for name in pointer_names(fetch))
    return Step(
        fetches=in_score,
        masked_fetches=masked,
        score=score,
        keep=keep,
        uses_kv_idx=any(Index("kv_idx") in walk(expr) for expr in everywhere),
        names=tuple(dict.fromkeys((*used, *pointers))),
        kept=kept,
        kept_inside=kept_inside,
        v_scale=v_scale,
        scales=scales,
        score_span=attention.score.span,
        keep_span=attention.mask.span,
    )


def fetches_for(fetches: Iterable[Fetch], *exprs: Expr) -> tuple[Fetch, ...]:
    """Selects the loads that the expressions need, themselves or through another of them, in their order."""
    by_name = {fetch.name: fetch for fetch in fetches}
    wanted: set[str] = set()
    todo = [*exprs]
    while todo:
        for node in walk(todo.pop()):
            if isinstance(node, Ref) and node.name in by_name and node.name not in wanted:
                wanted.add(node.name)
                todo += fetch_expressions((by_name[node.name],))
    return tuple(fetch for name, fetch in by_name.items() if name in wanted)


def kept_fetches(kernel: Kernel) -> tuple[Fetch, ...]:
    """Returns the loads of each key that say whether some query keeps it."""
    step = kernel.step
    along_keys = (f for f in (*kernel.outer, *step.fetches, *step.masked_fetches) if f.axes == ("kv",))
    return () if step.kept is None else fetches_for(along_keys, step.kept)


def pointer_names(fetch: Fetch) -> tuple[str, ...]:
    """Returns names that the load addresses through."""
    tensor, row = fetch.load.tensor, fetch.row
    done = 0 if row is None else len(row.indices)
    strides = (f"stride_{tensor}_{axis}" for axis in range(done, len(fetch.load.indices)))
    return (f"{tensor}_ptr" if row is None else row.name, *strides)


def names_of(expr: Expr) -> set[str]:
    """Returns what an expression reads: values, sizes, positions, and the rows that it searches."""
    nodes = list(walk(expr))
    found = {node.name for node in nodes if isinstance(node, Ref | Dim | Index)}
    return found | {node.row for node in nodes if isinstance(node, Search) and node.row}


def names_in(item: Statement) -> set[str]:
    """Returns what a statement reads: values, sizes, positions, and the pointers that it loads through."""
    found = {name for expr in statement_expressions(item) for name in names_of(expr)}
    return found | set(pointer_names(item) if isinstance(item, Fetch) else ())


def needed_for(read: Iterable[str], statements: Sequence[Statement]) -> list[Statement]:
    """Selects the statements that define these names, and what these are computed from."""
    wanted, found = set(read), list[Statement]()
    for item in reversed(statements):
        if item.name in wanted:
            found.insert(0, item)
            wanted |= names_in(item)
    return found


def tensors_of(statements: Iterable[Statement]) -> set[str]:
    """Returns the tensors that statements load, search or point into."""
    found: set[str] = set()
    for item in statements:
        match item:
            case Row(tensor=tensor) | Fetch(load=Load(tensor=tensor)):
                found.add(tensor)
            case Let(value=value):
                found |= {node.tensor for node in walk(value) if isinstance(node, Search)}
    return found


def is_short_integer(item: Statement, dtypes: Mapping[str, DType]) -> bool:
    """Returns whether it computes or loads one integer of 32 bits for a tile; dtypes: of tensors."""
    match item:
        case Let(value=value):
            return value.type not in ("float", "bool")
        case Fetch(axes=()) as fetch:
            load, short = fetch.load, (DType.I32, DType.U8)
            return load.type == "int" and (load.within is not None or dtypes[load.tensor] in short)
        case _:
            return False


def _in_step(names: LoadNames, inner: Axis) -> tuple[Fetch, ...]:
    return tuple(fetch for fetch in names.fetches if inner in fetch.axes)


def other_axis(axis: Axis) -> tuple[Axis, ...]:
    return ("q",) if axis == "kv" else ("kv",)


def _names(expressions: Iterable[Expr], defined: set[str]) -> Iterator[str]:
    """Yields names that expressions take from around them; the step itself has kv_idx and its own loads."""
    for kind in (Index, Dim, Ref):
        for expr in expressions:
            for node in walk(expr):
                if isinstance(node, kind) and node.name != "kv_idx" and node.name not in defined:
                    yield node.name


def kv_head_of(attention: Attention) -> Expr:
    match kv_heads(attention):
        case Dim(name="H"):
            return Index("h")
        case Const(value=1):
            return Const(0)
        case _:
            return Binary("//", Index("h"), Dim("G"))


def select_per_head(program: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Returns the statements whose values change with the query head."""
    late: list[Statement] = []
    for item in program:
        names = {other.name for other in late}
        row = item.row.name if isinstance(item, Fetch) and item.row else ""
        nodes = [node for expr in statement_expressions(item) for node in walk(expr)]
        if row in names or any(
            node == Index("h") or (isinstance(node, Ref) and node.name in names) for node in nodes
        ):
            late.append(item)
    return tuple(late)


def starts_with(kernel: Kernel, index: str) -> bool:
    """Returns whether what a program does first, or a bound, a range or a guard of its loops uses
    the index.
    """
    exprs = [expr for loop in kernel.regions.loops for expr in loop.expressions]
    first = (*kernel.program, *kernel.regions.statements)
    exprs += (expr for item in first for expr in statement_expressions(item))
    return any(Index(index) in walk(expr) for expr in exprs)


def dims_of(expressions: Iterable[Expr]) -> tuple[str, ...]:
    """Returns the run-time sizes that the kernel takes: B, H, M, N always, others where an expression reads
    them.
    """
    used = {node.name for expr in expressions for node in walk(expr) if isinstance(node, Dim)}
    first = ("B", "H", "G", "M", "N")
    kept = tuple(name for name in first if name != "G" or "G" in used)
    return (*kept, *sorted(used - set(first) - {"BLOCK_M", "BLOCK_N"}))


# --- the sequence at hand


#: Rows of q and o that the sequence has in memory, where M may be less.
Q_ROWS = Ref("q_rows", "int", within=(0, SIZE))


def sequences(attention: Attention, over: Axis = "q") -> Sequences | None:
    """Returns how tiles of ragged queries, or keys, are numbered; None when every sequence has M, or N, rows
    of memory. Their sizes are called as in generated code.
    """
    normal = normalise(attention)
    tensor, role = (normal.q, Role.QUERY) if over == "q" else (normal.k, Role.KEY)
    match tensor.storage:
        case Ragged(cu_seqlens=cu):
            return Sequences(cu_seqlens=cu, rows=tensor.size(role))
        case _:
            return None


def lengths(attention: Attention, names: LoadNames, *, in_tile: bool = True) -> tuple[Statement, ...]:
    """Returns M and N of the sequence at hand, from its place in ragged tensors and from the spec's `length`
    lines, after the values that those read.

    A `length` can shorten a sequence but never make it longer than its memory. in_tile: the program
    has one q tile.
    """
    statements: list[Statement] = []
    match attention.k.storage:
        case Ragged(cu_seqlens=cu):
            first, end = (
                _boundary(attention, cu, step, name) for step, name in ((0, "k_first"), (1, "k_end"))
            )
            length = Binary("-", _row(end), _row(first))
            statements += [first, end, Let(name="N", value=length)]
    if "M" in attention.lengths and not attention.q.storage.is_packed:
        statements.append(Let(name=Q_ROWS.name, value=Dim("M")))
    statements += shortened_lengths(attention, names)
    if in_tile and count_stored_rows(attention) == Q_ROWS:
        seen = Compare("<", Index("q_lo"), Dim("M"))
        comment = "a tile past the end of its sequence sees no key"
        statements.append(Let(name="N", value=Call("where", (seen, Dim("N"), Const(0))), comment=comment))
    return tuple(statements)


def key_lengths(attention: Attention, names: LoadNames, *, in_tile: bool) -> tuple[Statement, ...]:
    """Returns M and N of the sequence at hand for a program that owns keys, and walks over the queries of its
    sequence; N of packed keys is known from the tile. in_tile: it has one kv tile.
    """
    statements: list[Statement] = []
    match attention.q.storage:
        case Ragged(cu_seqlens=cu):
            first, end = (
                _boundary(attention, cu, step, name) for step, name in ((0, "q_first"), (1, "q_end"))
            )
            length = Binary("-", _row(end), _row(first))
            statements += [first, end, Let(name="M", value=length)]
    statements += shortened_lengths(attention, names)
    if in_tile and outruns(attention, "q"):
        exists = Compare("<", Index("kv_lo"), Dim("N"))
        comment = "a tile past the end of its sequence is seen by no query"
        statements.append(Let(name="M", value=Call("where", (exists, Dim("M"), Const(0))), comment=comment))
    return tuple(statements)


def program(names: LoadNames, lines: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Returns what a program does first: rows of inputs, the lengths of its sequence, and the values that
    neither index changes. lines: of `lengths`.
    """
    tile = tile_axes(names.fetches)
    scalars = [
        fetch for fetch in names.fetches if not fetch.axes and fetch not in lines and not tile[fetch.name]
    ]
    return (*names.rows.values(), *lines, *scalars)


def count_stored_rows(attention: Attention) -> Expr:
    """Returns rows of o that the memory of the sequence at hand has: those from M on get o = 0 and lse =
    -inf.
    """
    shortened = "M" in attention.lengths or attention.q.storage.is_packed
    return Q_ROWS if shortened else Dim("M")


def outruns(attention: Attention, inner: Axis) -> bool:
    """Returns whether a tile of the outer axis may lie past the end of its sequence, which then has no
    position of `inner`: what `facts` proves of a tile's place does not hold there.
    """
    if inner == "kv":
        return count_stored_rows(attention) == Q_ROWS
    return attention.k.storage.is_packed or "N" in attention.lengths


def _row(boundary: Fetch) -> Ref:
    return Ref(boundary.name, "int", within=(0, I32.hi))


def _boundary(attention: Attention, cu_seqlens: str, step: int, name: str) -> Fetch:
    index: Expr = Index("b") if step == 0 else Binary("+", Index("b"), Const(step))
    load = Load(cu_seqlens, (index,), attention.tensor(cu_seqlens).shape, "int")
    return Fetch(name=name, load=load, axes=(), guard=TRUE)


def rows(attention: Attention, names: LoadNames, *, pages: bool = True) -> Mapping[str, Rows]:
    """Returns where the rows of q, k, v and o (and of lse, like o) lie. pages: those of keys are found."""
    q_first = "q_first" if attention.q.storage.is_packed else None
    k = Rows(tensor="k")
    match attention.k.storage:
        case Ragged():
            k = Rows(tensor="k", first="k_first")
        case Paged(block_table=table, page=page) if pages:
            row = names.row(table, (Index("b"), Index("kv_idx")))
            assert row is not None, "a block table is [B, P]"
            k = Rows(tensor="k", page=page, table=row.name, table_stride=f"stride_{table}_1")
    v = k if attention.v.storage.is_part else replace(k, tensor="v")
    return {"q": Rows(tensor="q", first=q_first), "k": k, "v": v, "o": Rows(tensor="o", first=q_first)}


def sizes(attention: Attention, dims: tuple[str, ...], over: Axis = "q") -> tuple[str, ...]:
    """Returns the run-time sizes among the arguments of a kernel with a grid over tiles of `over`: M and N of
    ragged tensors are found on the device, from all their rows.
    """
    queries, keys = attention.q.storage.is_packed, attention.k.storage.is_packed
    local = {"M": queries, "N": keys}
    found = sequences(attention, over)
    passed = tuple(name for name in dims if not local.get(name, False))
    total = () if found is None or not isinstance(found.rows, Dim) else (found.rows.name,)
    return tuple(dict.fromkeys((*passed, *total)))
