"""What is loaded where, under which name: a pass that replaces every load of an expression by a reference to
a named value.

A load that depends on neither index happens once per program, one of the query row once per q tile, one of
the key in each step,
one of both element by element in the step. Equal loads share a name. Bounds that can be proved cost nothing;
the rest
become the load's guard, since a load outside its tensor reads 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import takewhile

from attnc.expr.construct import compare, conj
from attnc.expr.interval import BYTE
from attnc.expr.nodes import (
    TRUE,
    Binary,
    Call,
    Const,
    Dim,
    Expr,
    Index,
    Load,
    Ref,
    Search,
    children,
    rebuild,
    walk,
)
from attnc.model.attention import Attention
from attnc.plan.ir import Axis, Fetch, Row
from attnc.plan.names import KERNEL, own_name
from attnc.plan.signature import block, feature, value_columns


def axes_of(expr: Expr) -> tuple[Axis, ...]:
    """Returns the tile axes that the value varies along; the columns of o are those of its tile."""
    axes: set[str] = set()
    for node in walk(expr):
        match node:
            case Index(name="q_idx" | "q_pos"):
                axes.add("q")
            case Index(name="kv_idx" | "d"):
                axes.add("kv")
            case Ref(axes=own):
                axes.update(own)
    return tuple(axis for axis in ("q", "kv") if axis in axes)


def is_nonnegative(expr: Expr) -> bool:
    """Returns whether a value is provably >= 0, from the signs of indices and sizes alone (q_pos is negative
    when M > N).
    """
    match expr:
        case Const(value=value):
            return value >= 0
        case Index(name=name):
            return name != "q_pos"
        case Dim():
            return True
        case Binary(op="-", left=Dim(name="BLOCK_M" | "BLOCK_N"), right=Const(value=1)):
            return True
        case Binary(op="+" | "*" | "//" | "%", left=left, right=right):
            return is_nonnegative(left) and is_nonnegative(right)
        case Call(function="max", args=args):
            return any(map(is_nonnegative, args))
        case Call(function="min", args=args):
            return all(map(is_nonnegative, args))
        case Search():
            return True
        case Load(is_byte=True):
            return True
        case Ref(natural=natural):
            return natural
        case _:
            return False


def is_positive(expr: Expr) -> bool:
    """Returns whether a value is provably > 0 wherever a kernel has something to do."""
    match expr:
        case Const(value=value):
            return value > 0
        case Dim(name=name):
            return name in ("BLOCK_M", "BLOCK_N", "B", "H", "Hkv", "G", "M")
        case _:
            return False


_PROVEN = {("b", "B"), ("h", "H"), ("h_kv", "Hkv")}


def bounds_guard(load: Load, unproved: Collection[str], columns: int) -> Expr:
    """Returns the conditions, not provable here, under which every index of the load is inside its extent.

    unproved: ends of tiles that may lie in front of their sequence, since it may be empty; columns: of a tile
    of o, 0 where there is none.
    """
    conditions: list[Expr] = []
    for index, extent in zip(load.indices, load.extents, strict=True):
        match index, extent:
            case Index(name=name) | Ref(name=name), Dim(name=size) if (name, size) in _PROVEN:
                continue
            case Const(value=at), Const(value=size) if 0 <= at < size:
                continue
            case Index(name="d"), Const(value=size) if 0 < columns <= size:
                continue
        ends = any(isinstance(node, Index) and node.name in unproved for node in walk(index))
        if ends or not is_nonnegative(index):
            conditions.append(compare("<=", Const(0), index))
        conditions.append(compare("<", index, extent))
    return conj(*conditions) if conditions else TRUE


@dataclass(slots=True)
class LoadNames:
    """Gives loads their names; one per kernel, so that a name means one value everywhere in it.

    unproved, columns: as in `bounds_guard`.
    """

    fetches: list[Fetch] = field(default_factory=list)
    rows: dict[tuple[str, tuple[Expr, ...]], Row] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: set(KERNEL))
    unproved: Collection[str] = ()
    columns: int = 0

    @classmethod
    def of(cls, attention: Attention, past_end: Axis | None = None, taken: Collection[str] = ()) -> LoadNames:
        """Returns the names for a kernel of this attention, where sizes have names too. past_end: the axis
        along which a program's tile may lie past the end of its sequence (`sequence.outruns`); taken: names
        of other values.
        """
        sizes = {node for tensor in attention.inputs for size in tensor.shape for node in walk(size)}
        others = {*KERNEL, *(node.name for node in sizes if isinstance(node, Dim)), *taken}
        columns = 0
        if attention.epilogue is not None:  # of the widest tile of o: that of keys, where these are values
            is_part = attention.v.storage.is_part
            columns = block(feature(attention.k)) if is_part else value_columns(attention)
        return cls(taken=others, unproved=() if past_end is None else (f"{past_end}_hi",), columns=columns)

    def apart(self) -> LoadNames:
        """Returns the same names, of which others are taken from now on: for text that stands elsewhere."""
        return replace(self, fetches=list(self.fetches), rows=dict(self.rows), taken=set(self.taken))

    def replace(self, expr: Expr) -> Expr:
        """Returns the expression with every load replaced by a Ref; new fetches are appended in evaluation
        order.
        """
        operands = tuple(self.replace(child) for child in children(expr))
        expr = rebuild(expr, operands)
        if not isinstance(expr, Load):
            return expr
        for fetch in self.fetches:
            if fetch.load == expr:
                return _make_ref(fetch, expr)
        axes = axes_of(expr)
        name = self._name(expr.tensor, axes, expr.indices)
        fetch = Fetch(
            name=name,
            load=expr,
            axes=axes,
            guard=bounds_guard(expr, self.unproved, self.columns),
            row=self.row(expr.tensor, expr.indices),
        )
        self.fetches.append(fetch)
        return _make_ref(fetch, expr)

    def row(self, tensor: str, indices: tuple[Expr, ...]) -> Row | None:
        """Returns the pointer shared by all accesses with these leading b, h and constant indices; None when
        it would save nothing.
        """
        leading = tuple(takewhile(_is_program_wide, indices))
        if not leading or len(leading) == len(indices):
            return None
        if (tensor, leading) not in self.rows:
            self.rows[tensor, leading] = Row(
                name=self.free_name(own_name(f"{tensor}_row")), tensor=tensor, indices=leading
            )
        return self.rows[tensor, leading]

    def _name(self, tensor: str, axes: tuple[Axis, ...], indices: tuple[Expr, ...]) -> str:
        base = {(): tensor, ("q",): f"{tensor}_q", ("kv",): f"{tensor}_kv"}.get(axes, f"{tensor}_tile")
        if any(Index("d") in walk(index) for index in indices):
            base = f"{tensor}_tile" if "q" in axes else f"{tensor}_d"
        ends = {node.name for index in indices for node in walk(index) if isinstance(node, Index | Ref)}
        for end, suffix in _ENDS.items():
            if end in ends:
                base = f"{tensor}_{suffix}"
        return self.free_name(own_name(base))

    def free_name(self, base: str) -> str:
        """Returns `base`, or `base_2`, ... when a value has that name already, or one that is made of it."""
        name, count = base, 2
        while not self.taken.isdisjoint(_made_of(name)):
            name, count = f"{base}_{count}", count + 1
        self.taken.update(_made_of(name))
        return name


#: What printers put behind the name of a value for others that it is made of: where it lies in shared memory,
#: words of bits, the same value of the next tile or of the neighbours.
BEHIND = (
    "ahead", "at", "bits", "chunks", "columns", "first", "line", "of", "of_lane", "of_row", "pairs", "word",
)  # fmt: skip


def _made_of(name: str) -> list[str]:
    return [name, *(f"{name}_{behind}" for behind in BEHIND)]


_ENDS = {
    "q_lo": "first",
    "first_pos": "first",
    "kv_lo": "first",
    "q_hi": "last",
    "last_pos": "last",
    "kv_hi": "last",
}


def _make_ref(fetch: Fetch, load: Load) -> Ref:
    wide, within = load.wide and load.within is None, load.within
    if load.is_byte and within is None:
        within = (BYTE.lo, BYTE.hi)
    return Ref(
        fetch.name, load.type, fetch.axes, natural=load.is_byte, wide=wide, within=within, span=load.span
    )


def _is_program_wide(index: Expr) -> bool:
    return isinstance(index, Const) or (isinstance(index, Index) and index.name in ("b", "h"))
