"""Which keys a tile of queries may see, as numbers: `expr.solve` evaluated for all tiles at once.

A row is a row of the tensor that ranks share out: of q[B, M, ...] one of M, for every sequence; of packed q
one of all sequences. Spans of keys are rows of k in the same sense.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.distributed.derive import keeps_order
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import (
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Expr,
    Index,
    Load,
    Neg,
    Ref,
    Search,
    children,
    walk,
)
from attnc.expr.simplify import make, nnf, substitute
from attnc.expr.solve import solve
from attnc.model.attention import Attention

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

#: Rows of q, and keys, for which something is decided together.
TILE, BLOCK = 128, 16
#: Pairs of a tile and a block that are looked at for gaps in spans.
_PAIRS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """All that the plan of a call depends on, except for the spec.

    queries, keys: rows of q and k that the ranks share out; heads, kv_heads: of q, of k and v; ends_q,
    ends_k: where packed sequences begin and the last one ends, B + 1 numbers; tensors: what the mask reads,
    on the host; dims: sizes with names of their own.
    """

    batch: int = 1
    queries: int
    keys: int
    heads: int = 1
    kv_heads: int = 1
    ends_q: Ints | None = None
    ends_k: Ints | None = None
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Columns of q and k, and of v and o; bytes of an element."""

    d: int
    dv: int
    bytes: int = 2


@dataclass(frozen=True, slots=True)
class TileSpans:
    """Tiles of query rows and the keys that they may see.

    row: the first row; rows: how many; lo, hi: the span of keys, none where lo >= hi; seen: where spans have
    gaps, pairs of a tile and a block of `BLOCK` keys that it sees. Several tiles have the same rows where
    sequences or heads differ.
    """

    row: Ints
    rows: Ints
    lo: Ints
    hi: Ints
    seen: tuple[Ints, Ints] | None


class Visibility:
    """The mask of one attention, solved for keys. `reads`: the inputs whose contents it depends on."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        mask = nnf(attention.sized.mask)
        ranges = solve(mask, "kv_idx")
        self._names: dict[Expr, Ref] = {}
        self._named: list[tuple[str, Function]] = []
        found = [e for e in (ranges.may_lo, ranges.may_hi, ranges.tile_may) if e is not None]
        self._name(found)
        self._lo, self._hi, self._tile_may = (
            None if e is None else function_of(substitute(e, self._names))
            for e in (ranges.may_lo, ranges.may_hi, ranges.tile_may)
        )
        self._never = ranges.never
        lengths = tuple(attention.lengths.values())
        self._lengths_of = {name: function_of(e) for name, e in attention.lengths.items()}
        exprs = [e for e in (ranges.may_lo, ranges.may_hi, ranges.tile_may, *lengths) if e is not None]
        nodes = [node for expr in exprs for node in walk(expr)]
        self.reads = tuple(
            dict.fromkeys(node.tensor for node in nodes if isinstance(node, Load | Search) and node.tensor)
        )
        self._by_sequence = bool(lengths) or Index("b") in nodes
        self._by_head = Index("h") in nodes

    @cached_property
    def by_order(self) -> bool:
        return keeps_order(self.attention)

    def tiles(self, sizes: CallSizes, tile: int = TILE) -> TileSpans:
        b, row, q_lo, rows, lengths = self._cut(sizes, tile)
        first: Value = 0 if sizes.ends_k is None else sizes.ends_k[b]
        h: Value = 0
        if self._by_head:
            h = np.repeat(np.arange(sizes.heads, dtype=np.int64), len(row))
            row, q_lo, rows = (np.tile(x, sizes.heads) for x in (row, q_lo, rows))
            b, first = (np.tile(x, sizes.heads) if np.ndim(x) else x for x in (b, first))
            lengths = {name: np.tile(x, sizes.heads) if np.ndim(x) else x for name, x in lengths.items()}
        indices = {"b": b, "h": h, "q_lo": q_lo, "q_hi": q_lo + rows - 1}
        env = self._environment(sizes, indices, lengths)
        keys = lengths["N"]
        first_seen: Value = 0 if self._lo is None else np.maximum(self._lo(env), 0)
        behind: Value = keys if self._hi is None else np.minimum(self._hi(env), keys)
        if self._never:
            behind = first_seen
        lo, hi = (x if np.ndim(x) else np.full(len(row), x, np.int64) for x in (first_seen, behind))
        seen = None if self._tile_may is None else self._visible_blocks(self._tile_may, env, lo, hi, first)
        if sizes.ends_k is not None:
            lo, hi = lo + first, hi + first
        return TileSpans(row, rows, lo, hi, seen)

    def _cut(self, sizes: CallSizes, tile: int) -> tuple[Value, Ints, Ints, Ints, dict[str, Value]]:
        """Cuts rows into tiles; says of each: sequence, first row, first query in its sequence, rows, and
        lengths M and N; one number where all have the same.
        """
        b: Value = 0
        if sizes.ends_q is not None:
            ends = sizes.ends_q
            total = int(ends[-1]) if len(ends) else 0
            cuts = np.unique(np.concatenate((np.arange(0, total, tile), ends.astype(np.int64))))
            row, rows = cuts[:-1], np.diff(cuts)
            b = np.searchsorted(ends, row, "right") - 1
            q_lo = row - ends[b]
        else:
            row = np.arange(0, sizes.queries, tile, dtype=np.int64)
            count = sizes.batch if self._by_sequence or sizes.ends_k is not None else min(sizes.batch, 1)
            if count != 1:
                b, row = np.repeat(np.arange(count), len(row)), np.tile(row, count)
            q_lo, rows = row, np.minimum(row + tile, sizes.queries) - row
        lengths = self._lengths(sizes, b)
        if "M" in self._lengths_of:
            rows = np.clip(lengths["M"] - q_lo, 0, rows)
            kept = rows > 0
            row, rows, q_lo = row[kept], rows[kept], q_lo[kept]
            b = b[kept] if np.ndim(b) else b
            lengths = {name: x[kept] if np.ndim(x) else x for name, x in lengths.items()}
        return b, row, q_lo, rows, lengths

    def _lengths(self, sizes: CallSizes, b: Value) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, whole, ends in (
            ("M", sizes.queries, sizes.ends_q),
            ("N", sizes.keys, sizes.ends_k),
        ):
            length = whole if ends is None else np.diff(ends)[b]
            if name in self._lengths_of:
                given = self._lengths_of[name](self._environment(sizes, {"b": b}, {}))
                length = np.minimum(np.maximum(given, 0), length)
            found[name] = length if np.ndim(length) else int(length)
        return found

    def _environment(
        self, sizes: CallSizes, indices: Mapping[str, Value], lengths: Mapping[str, Value]
    ) -> Env:
        dims: dict[str, Any] = {
            "B": sizes.batch,
            "M": sizes.queries,
            "N": sizes.keys,
            "H": sizes.heads,
            "Hkv": sizes.kv_heads,
            "G": sizes.heads // max(sizes.kv_heads, 1),
            **sizes.dims,
            **lengths,
        }
        names: dict[str, Any] = {}
        env = Env(indices=indices, dims=dims, tensors=sizes.tensors, names=names)
        if "q_lo" in indices:
            for name, function in self._named:
                names[name] = function(env)
        return env

    def _name(self, exprs: list[Expr]) -> None:
        """Names the loads, and the subexpressions that occur several times and do not depend on the key:
        `_environment` evaluates it once for all tiles.
        """
        nodes = [
            node for expr in exprs for node in reversed(tuple(walk(expr)))
        ]  # what is within others first
        count = Counter(nodes)
        for node, times in count.items():
            is_read = isinstance(node, Load | Search)
            if (is_read or (times > 1 and children(node))) and not _KEYS & set(walk(node)):
                name = f"value_{len(self._named)}"
                operands = tuple(substitute(child, self._names) for child in children(node))
                self._named.append((name, function_of(make(node, operands))))
                self._names[node] = Ref(name, node.type, ("q",))

    @staticmethod
    def _visible_blocks(
        tile_may: Function, env: Env, lo: Ints, hi: Ints, first: Value
    ) -> tuple[Ints, Ints] | None:
        """Finds the tiles and blocks of keys within the spans that the test of a tile leaves; None where
        spans are too long to look for gaps in them.
        """
        begin = (lo + first) // BLOCK
        count = np.maximum(-(-(hi + first) // BLOCK) - begin, 0) * (lo < hi)
        if int(count.sum()) > _PAIRS:
            return None
        tile = np.repeat(np.arange(len(lo), dtype=np.int64), count)
        block = np.arange(len(tile), dtype=np.int64) + np.repeat(begin - (count.cumsum() - count), count)

        def take_pairs(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: x[tile] if np.ndim(x) else x for name, x in values.items()}

        key = block * BLOCK - (first[tile] if np.ndim(first) else first)
        ends = {"kv_lo": np.maximum(key, lo[tile]), "kv_hi": np.minimum(key + BLOCK, hi[tile]) - 1}
        pairs = Env(
            indices={**take_pairs(env.indices), **ends},
            dims=take_pairs(env.dims),
            tensors=env.tensors,
            names=take_pairs(env.names),
        )
        kept = np.broadcast_to(tile_may(pairs), tile.shape)
        return tile[kept], block[kept]


#: What differs from key to key.
_KEYS = {Index(name) for name in ("kv_idx", "kv_lo", "kv_hi")}


#: An array, or a number.
Value: TypeAlias = Any
Function: TypeAlias = Callable[[Env], Value]

_OPERATORS: Mapping[str, Callable[[Value, Value], Value]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def function_of(expr: Expr) -> Function:
    """Returns the values of `expr`, which broadcast with those of its leaves."""
    match expr:
        case Const(value=value):
            return lambda env: value
        case Index(name=name) if name != "q_pos":
            return lambda env: env.indices[name]
        case Dim(name=name):
            return lambda env: env.dims[name]
        case Ref(name=name):
            return lambda env: env.names[name]
        case Neg(operand=operand, type="int"):
            negated = function_of(operand)
            return lambda env: -negated(env)
        case Binary(op="+" | "-" | "*" as op, type="int") | Compare(op=op):
            return _elementwise(_OPERATORS[op], expr.left, expr.right)
        case Call(function="min" | "max" as function, type="int"):
            return _elementwise(minimum if function == "min" else maximum, *expr.args)
        case Load():
            return _load(expr)
        case Search():
            return _search(expr)
        case _:
            return lambda env: evaluate(expr, env)


def minimum(x: Value, y: Value) -> Value:
    """Takes the smaller one, of numbers or element by element."""
    return (x if x <= y else y) if isinstance(x, int) and isinstance(y, int) else np.minimum(x, y)


def maximum(x: Value, y: Value) -> Value:
    """Takes the larger one, of numbers or element by element."""
    return (x if x >= y else y) if isinstance(x, int) and isinstance(y, int) else np.maximum(x, y)


def _elementwise(operation: Callable[[Value, Value], Value], left: Expr, right: Expr) -> Function:
    first, second = function_of(left), function_of(right)
    return lambda env: operation(first(env), second(env))


def _load(node: Load) -> Function:
    place = _place(node.indices, node.extents)

    def value(env: Env) -> Value:
        table = np.asarray(env.tensors[node.tensor])
        at, inside = place(table.shape, env)
        if not table.size or inside is False:
            return np.zeros(np.shape(at), table.dtype)
        read = table.reshape(-1).take(at, mode="clip")
        return read if inside is True else np.where(inside, read, 0)

    return value


def _search(node: Search) -> Function:
    sought, extents = function_of(node.value), function_of(node.length)
    place = _place(node.prefix, node.extents[:-1])
    side: Literal["left", "right"] = "left" if node.side == "lower" else "right"

    def value(env: Env) -> Value:
        table = np.asarray(env.tensors[node.tensor])
        length = table.shape[-1]
        row, inside = place(table.shape[:-1], env)
        extent = minimum(maximum(extents(env), 0), length)
        if inside is not True:
            row = np.where(inside, row, -1)
        key = row * (length + 1) + extent  # a row of the table, and how much of it
        table, distinct, given = table.reshape(-1, length), _distinct(key), sought(env)
        if len(distinct) == 1:
            return _line(table, distinct[0]).searchsorted(given, side)
        given, key = np.broadcast_arrays(given, key)
        found = np.zeros(given.shape, np.int64)
        for one in distinct:
            same = key == one
            found[same] = _line(table, one).searchsorted(given[same], side)
        return found

    return value


def _line(table: Value, key: int) -> Value:
    row, end = divmod(key, table.shape[1] + 1)
    return table[row, :end] if row >= 0 else np.zeros(end, table.dtype)


def _place(indices: Sequence[Expr], extents: Sequence[Expr]) -> Callable[[tuple[int, ...], Env], Value]:
    axes = [(function_of(index), function_of(extent)) for index, extent in zip(indices, extents, strict=True)]

    def place(shape: tuple[int, ...], env: Env) -> tuple[Value, Value]:
        at: Value = 0
        inside: Value = True
        for (index, extent), size in zip(axes, shape, strict=True):
            i, end = index(env), minimum(extent(env), size)
            if isinstance(i, int) and isinstance(end, int):
                within: Value = 0 <= i < end
            else:
                within = (i >= 0) & (i < end)
            inside = within if inside is True else inside & within
            at = at * size + i
        return at, inside

    return place


def _distinct(keys: Value) -> list[int]:
    if isinstance(keys, int):
        return [keys]
    first = keys.flat[0] if keys.size else 0
    return [int(first)] if (keys == first).all() else np.unique(keys).tolist()
