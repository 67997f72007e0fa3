"""The sequence at hand: its lengths, and where its rows lie, as statements and names of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnc.expr.interval import I32, SIZE
from attnc.expr.nodes import TRUE, Binary, Call, Compare, Const, Dim, Expr, Index, Load, Ref
from attnc.model.attention import Attention
from attnc.model.tensors import Paged, Ragged, Role
from attnc.plan.access import Rows, Sequences
from attnc.plan.ir import Axis, Fetch, Let, Statement
from attnc.plan.loads import LoadNames
from attnc.plan.steps import shortened_lengths, tile_axes

#: Rows of q and o that the sequence has in memory, where M may be less.
Q_ROWS = Ref("q_rows", "int", within=(0, SIZE))


def sequences(attention: Attention, over: Axis = "q") -> Sequences | None:
    """How tiles of ragged queries, or keys, are numbered; None when every sequence has M, or N, rows of
    memory.
    """
    tensor, role = (attention.q, Role.QUERY) if over == "q" else (attention.k, Role.KEY)
    match tensor.storage:
        case Ragged(cu_seqlens=cu):
            return Sequences(cu_seqlens=cu, rows=tensor.size(role))
        case _:
            return None


def lengths(attention: Attention, names: LoadNames, *, in_tile: bool = True) -> tuple[Statement, ...]:
    """M and N of the sequence at hand, from its place in ragged tensors and from the spec's `length` lines,
    after the values that those read.

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
    if in_tile and stored(attention) == Q_ROWS:
        seen = Compare("<", Index("q_lo"), Dim("M"))
        comment = "a tile past the end of its sequence sees no key"
        statements.append(Let(name="N", value=Call("where", (seen, Dim("N"), Const(0))), comment=comment))
    return tuple(statements)


def key_lengths(attention: Attention, names: LoadNames, *, in_tile: bool = True) -> tuple[Statement, ...]:
    """The same for a program that owns keys, and walks over the queries of its sequence; N of packed keys is
    known from the tile. in_tile: it has one kv tile.
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
    """What a program does first: rows of inputs, the lengths of its sequence, and the values that neither
    index changes. lines: of `lengths`.
    """
    tile = tile_axes(names.fetches)
    scalars = [
        fetch for fetch in names.fetches if not fetch.axes and fetch not in lines and not tile[fetch.name]
    ]
    return (*names.rows.values(), *lines, *scalars)


def stored(attention: Attention) -> Expr:
    """Rows of o that the memory of the sequence at hand has: those from M on get o = 0 and lse = -inf."""
    shortened = "M" in attention.lengths or attention.q.storage.is_packed
    return Q_ROWS if shortened else Dim("M")


def outruns(attention: Attention, inner: Axis) -> bool:
    """Whether a tile of the outer axis may lie past the end of its sequence, which then has no position of
    `inner`: what `facts` proves of a tile's place does not hold there.
    """
    if inner == "kv":
        return stored(attention) == Q_ROWS
    return attention.k.storage.is_packed or "N" in attention.lengths


def _row(boundary: Fetch) -> Ref:
    """The number of a packed row, of which `ends` has the first and that past the last of each sequence."""
    return Ref(boundary.name, "int", within=(0, I32.hi))


def _boundary(attention: Attention, cu_seqlens: str, step: int, name: str) -> Fetch:
    index: Expr = Index("b") if step == 0 else Binary("+", Index("b"), Const(step))
    load = Load(cu_seqlens, (index,), attention.tensor(cu_seqlens).shape, "int")
    return Fetch(name=name, load=load, axes=(), guard=TRUE)


def rows(attention: Attention, names: LoadNames) -> Mapping[str, Rows]:
    """Where the rows of q, k, v and o (and of lse, like o) lie."""
    q_first = "q_first" if attention.q.storage.is_packed else None
    k = Rows(tensor="k")
    match attention.k.storage:
        case Ragged():
            k = Rows(tensor="k", first="k_first")
        case Paged(block_table=table, page=page):
            row = names.row(table, (Index("b"), Index("kv_idx")))
            assert row is not None, "a block table is [B, P]"
            k = Rows(tensor="k", page=page, table=row.name, table_stride=f"stride_{table}_1")
    v = k if attention.v.storage.is_part else replace(k, tensor="v")
    return {"q": Rows(tensor="q", first=q_first), "k": k, "v": v, "o": Rows(tensor="o", first=q_first)}


def sizes(attention: Attention, dims: tuple[str, ...], over: Axis = "q") -> tuple[str, ...]:
    """The run-time sizes among the arguments of a kernel with a grid over tiles of `over`: M and N of ragged
    tensors are found on the device, from all their rows.
    """
    queries, keys = attention.q.storage.is_packed, attention.k.storage.is_packed
    local = {"M": queries, "N": keys}
    found = sequences(attention, over)
    passed = tuple(name for name in dims if not local.get(name, False))
    total = () if found is None or not isinstance(found.rows, Dim) else (found.rows.name,)
    return tuple(dict.fromkeys((*passed, *total)))
