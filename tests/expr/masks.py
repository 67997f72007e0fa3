"""Random masks, the tensors that they load from, and the truth about every tile by brute force."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import (
    And,
    Binary,
    Call,
    Compare,
    CompareOp,
    Const,
    Dim,
    Expr,
    Index,
    Neg,
    Not,
    Or,
)
from tests.expr.spell import load, spell

POSITIONS = tuple(Index(name) for name in ("kv_idx", "kv_idx", "q_pos", "q_pos", "q_idx"))
SCALARS = (
    Index("b"), Index("h"), Dim("M"), Dim("N"), spell("kv_len[b]"), spell("prefix[b]"), spell("width[h]"),
)  # fmt: skip
ORDERS: tuple[CompareOp, ...] = ("<", "<=", ">", ">=")
COMPARISONS: tuple[CompareOp, ...] = (*ORDERS, "==", "!=")

constants = st.integers(-6, 9).map(Const)
sizes = st.integers(1, 6).map(Const)


@st.composite
def ints(draw: st.DrawFn, depth: int) -> Expr:
    """An int expression of positions, sizes and loads."""
    kinds: tuple[str, ...] = ("position", "position", "scalar", "const", "position + c")
    if depth > 0:
        kinds += ("+", "-", "*", "//", "%", "abs", "min", "max", "where", "doc", "tag", "neg", "// c")
    match draw(st.sampled_from(kinds)):
        case "position":
            return draw(st.sampled_from(POSITIONS))
        case "scalar":
            return draw(st.sampled_from(SCALARS))
        case "const":
            return draw(constants)
        case "position + c":
            return Binary("+", draw(st.sampled_from(POSITIONS)), draw(constants))
        case "+" | "-" as op:
            return Binary(op, draw(ints(depth - 1)), draw(ints(depth - 1)))
        case "*":
            return Binary("*", draw(ints(depth - 1)), draw(st.one_of(constants, st.sampled_from(SCALARS))))
        case "//" | "%" as op:
            divisor = draw(st.one_of(sizes, sizes, constants, st.sampled_from(SCALARS)))
            return Binary(op, draw(ints(depth - 1)), divisor)
        case "// c":
            return Binary("//", draw(st.sampled_from(POSITIONS)), draw(sizes))
        case "abs":
            return Call("abs", (draw(ints(depth - 1)),))
        case "neg":
            return Neg(draw(ints(depth - 1)))
        case "min" | "max" as function:
            return Call(function, (draw(ints(depth - 1)), draw(ints(depth - 1))))
        case "where":
            return Call("where", (draw(masks(depth - 1)), draw(ints(depth - 1)), draw(ints(depth - 1))))
        case tensor:
            index = draw(st.one_of(st.sampled_from(POSITIONS), ints(depth - 1)))
            return load(tensor, Index("b"), index)


@st.composite
def floats(draw: st.DrawFn) -> Expr:
    match draw(st.sampled_from(("slope * i", "time", "scalar", "bias", "sum"))):
        case "slope * i":
            return Binary("*", spell("slope[h]"), draw(ints(1)))
        case "time":
            return load("time", Index("b"), draw(st.one_of(st.sampled_from(POSITIONS), ints(1))))
        case "bias":
            return spell("bias[h, q_idx, kv_idx]")
        case "scalar":
            choices = (Const(1.5), spell("slope[h]"), spell("prefix[b] / 2"), Const(float("inf")))
            return draw(st.sampled_from(choices))
        case _:
            left, right = draw(floats()), draw(floats())
            function = draw(st.sampled_from(("+", "-", "min", "max", "abs")))
            if function == "abs":
                return Call("abs", (left,))
            if function in ("min", "max"):
                return Call(function, (left, right))
            return Binary("+" if function == "+" else "-", left, right)


#: What is compared with far integers: sums of positions, and what makes bounds multiply.
NEAR = tuple(
    spell(text)
    for text in (
        "q_pos - kv_idx", "abs(q_pos - kv_idx)", "kv_idx // 3", "3 * kv_idx", "kv_idx % 4",
        "min(kv_idx, limit[b])", "doc[b, kv_idx]", "stamp[b, kv_idx]", "stamp[b, q_pos]",
        "stamp[b, kv_idx] // 1000", "kv_idx + limit[b] // 2", "stamp[b, kv_idx] // 8 - q_pos",
    )
)  # fmt: skip


@st.composite
def far(draw: st.DrawFn, depth: int) -> Expr:
    """One of a few integers, some at the ends of 64 bits: nothing is made of them that has more."""
    kinds = ("limit", "limit", "stamp", "scalar", "position")
    match draw(st.sampled_from((*kinds, "min", "max", "where", "//") if depth > 0 else kinds)):
        case "//":
            return Binary("//", draw(far(depth - 1)), draw(st.sampled_from((2, 3, 8, 1000)).map(Const)))
        case "limit":
            return spell("limit[b]")
        case "stamp":
            return load("stamp", Index("b"), draw(ints(0)))
        case "scalar":
            return draw(st.sampled_from(SCALARS))
        case "position":
            return draw(st.sampled_from(POSITIONS))
        case "where":
            return Call("where", (draw(atoms(0)), draw(far(depth - 1)), draw(far(depth - 1))))
        case function:
            return Call(function, (draw(far(depth - 1)), draw(far(depth - 1))))


@st.composite
def atoms(draw: st.DrawFn, depth: int) -> Expr:
    """A mask without connectives: a usual one, a comparison, or a bool load."""
    kinds = (
        "compare", "compare", "order", "causal", "window", "same block", "same doc", "load", "float", "far",
        "bit",
    )  # fmt: skip
    match draw(st.sampled_from(kinds)):
        case "compare":
            return Compare(draw(st.sampled_from(COMPARISONS)), draw(ints(depth)), draw(ints(depth)))
        case "bit":
            return Call("bit", (draw(ints(depth)), draw(ints(depth))))
        case "order":
            op = draw(st.sampled_from(ORDERS))
            return Compare(op, draw(st.sampled_from(POSITIONS)), draw(ints(depth)))
        case "causal":
            return spell(draw(st.sampled_from(("kv_idx <= q_pos", "kv_idx > q_pos", "kv_idx <= q_idx"))))
        case "window":
            left, right = draw(ints(0)), draw(ints(0))
            q, kv = draw(st.sampled_from((Index("q_pos"), Index("q_idx")))), Index("kv_idx")
            return And((Compare("<=", Binary("-", q, left), kv), Compare("<=", kv, Binary("+", q, right))))
        case "same block":
            op = draw(st.sampled_from(COMPARISONS))
            size = draw(sizes)
            return Compare(op, Binary("//", Index("q_pos"), size), Binary("//", Index("kv_idx"), size))
        case "same doc":
            op = draw(st.sampled_from(COMPARISONS))
            tensor = draw(st.sampled_from(("doc", "doc", "time", "tag")))
            left = load(tensor, Index("b"), Index("q_pos"))
            return Compare(op, left, load(tensor, Index("b"), draw(ints(0))))
        case "far":
            near = st.one_of(st.sampled_from(NEAR), st.sampled_from(POSITIONS), far(1))
            return Compare(draw(st.sampled_from(COMPARISONS)), draw(near), draw(far(2)))
        case "load":
            return draw(st.sampled_from((spell("flag[b]"), spell("keep[b, kv_idx]"))))
        case _:
            right = draw(st.one_of(floats(), ints(1)))
            return Compare(draw(st.sampled_from(COMPARISONS)), draw(floats()), right)


@st.composite
def masks(draw: st.DrawFn, depth: int = 2) -> Expr:
    """A mask: atoms under and, or, not, `where` and equality."""
    kinds = ("atom", "and", "and", "or", "or", "not", "where", "same") if depth > 0 else ("atom",)
    match draw(st.sampled_from(kinds)):
        case "and":
            return And(tuple(draw(st.lists(masks(depth - 1), min_size=2, max_size=3))))
        case "or":
            return Or(tuple(draw(st.lists(masks(depth - 1), min_size=2, max_size=3))))
        case "not":
            return Not(draw(masks(depth - 1)))
        case "where":
            return Call("where", (draw(atoms(1)), draw(masks(depth - 1)), draw(masks(depth - 1))))
        case "same":
            return Compare(draw(st.sampled_from(("==", "!="))), draw(atoms(1)), draw(masks(depth - 1)))
        case _:
            return draw(atoms(max(depth, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One head of one sequence, cut into tiles; and what each element of it is."""

    env: Env
    m: int
    n: int
    tile_q: int
    tile_kv: int

    @property
    def tiles(self) -> Env:
        """The bounds of all tiles: q down, kv across."""
        q, kv = np.arange(0, self.m, self.tile_q), np.arange(0, self.n, self.tile_kv)
        bounds = {
            "q_lo": q[:, None],
            "q_hi": np.minimum(q + self.tile_q, self.m)[:, None] - 1,
            "kv_lo": kv,
            "kv_hi": np.minimum(kv + self.tile_kv, self.n) - 1,
        }
        scalars = {name: self.env.indices[name] for name in ("b", "h")}
        return replace(self.env, indices={**scalars, **bounds})

    def kept(self, mask: Expr) -> npt.NDArray[np.bool_]:
        return np.broadcast_to(evaluate(mask, self.env), (self.m, self.n))

    def over_tiles(self, expr: Expr) -> npt.NDArray[np.bool_]:
        shape = (-(-self.m // self.tile_q), -(-self.n // self.tile_kv))
        return np.broadcast_to(evaluate(expr, self.tiles), shape)


def tensors(rng: np.random.Generator, batch: int, heads: int, m: int, n: int) -> dict[str, npt.NDArray[Any]]:
    """What masks read: lengths in and out of 0..n, documents that start below, at or above 0, integers at the
    ends of 64 bits, and floats of which some are no finite numbers.
    """

    def special(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        none = rng.choice([np.nan, np.inf, -np.inf], numbers.shape)
        return np.where(rng.random(numbers.shape) < 0.4, none, numbers)

    ends = np.array([-(2**63), -(2**63) + 1, -1, 0, n, 2**63 - 2, 2**63 - 1])
    return {
        "kv_len": rng.integers(-1, n + 3, batch),
        "prefix": rng.integers(-1, n + 2, batch),
        "width": rng.integers(-2, n + 2, heads),
        "doc": np.sort(rng.integers(rng.integers(-3, 3), 4, (batch, n)), axis=-1),
        "tag": rng.integers(-2, 4, (batch, n)),
        "slope": special(rng.integers(-4, 5, heads) / 2),
        "time": np.sort(rng.integers(-6, 7, (batch, n)) / 2, axis=-1),
        "bias": special(rng.standard_normal((heads, m, n))),
        "flag": rng.random(batch) < 0.5,
        "keep": rng.random((batch, n)) < 0.7,
        "limit": rng.choice(ends, batch),
        "stamp": np.sort(rng.choice(ends, (batch, n)), axis=-1),
    }


def case(seed: int, m: int, n: int, tile_q: int, tile_kv: int) -> Case:
    """Tensors and a head drawn from a seed."""
    rng = np.random.default_rng(seed)
    batch, heads = 2, 2
    drawn = tensors(rng, batch, heads, m, n)
    indices: dict[str, npt.NDArray[np.int64] | int] = {
        "b": int(rng.integers(batch)),
        "h": int(rng.integers(heads)),
        "q_idx": np.arange(m)[:, None],
        "kv_idx": np.arange(n),
    }
    dims = {"B": batch, "H": heads, "M": m, "N": n}
    env = Env(indices=indices, dims=dims, tensors=drawn)
    return Case(env=env, m=m, n=n, tile_q=tile_q, tile_kv=tile_kv)


SHAPES = ((1, 1), (1, 9), (5, 5), (7, 4), (6, 13), (9, 9), (11, 5))
TILES = ((1, 1), (2, 3), (4, 4), (3, 2))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    m, n = draw(st.sampled_from(SHAPES))
    tile_q, tile_kv = draw(st.sampled_from(TILES))
    return case(draw(st.integers(0, 2**16)), m, n, tile_q, tile_kv)
