"""Scores that forget: `dot(q, k) / sqrt(D) + c[b, h, q_pos] - c[b, h, kv_idx]` with `c is descending`. Keys
far behind a query weigh next to nothing there (forgetting attention, arXiv 2503.02130; what need not be
computed of it, arXiv 2504.06949).

Of keys j, row i has p_ij = exp(s_ij - lse_i). Its own key is visible, with a bias of 0, so that lse_i is at
least the score of that, and

    p_ij <= exp(c_i - c_j + r(q_i k_j) - r(q_i k_i)) <= exp(c_i - c_j + 2 L |q_i| |k|)

where r is the rest of the score, L its steepest slope and |k| the longest key. A key with
c_j - c_i >= margin = 2 L |q| |k| + log(N / share) has p_ij <= share / N: all such keys together weigh less
than `share`, an eighth of what rounding p loses. They are the first ones, since c descends, and a search
finds where they end. The norms are computed before each call (`support.margins`), and nothing is assumed of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from attnc.diagnostics import Diagnostic, warning
from attnc.expr.affine import N, lies_inside
from attnc.expr.construct import add, maximum, minimum, mul, sub
from attnc.expr.functions import REAL
from attnc.expr.interval import classify
from attnc.expr.nodes import TRUE, Binary, Call, Const, Dim, Dot, Expr, Index, Load, Neg, Search, uses, walk
from attnc.expr.simplify import simplify, substitute
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.tensors import Role, Tensor
from attnc.plan.ir import Arg, Axis, Bind, Margin
from attnc.plan.signature import is_plain, kv_heads, normalise

#: The tensor of margins, f32[B, H].
MARGIN = "_margin"
#: What adding a margin to c, and c itself, may round: relative to c.
_ROUNDING = 2.0**-22
_FIRST = Binary("-", Binary("+", Index("q_lo"), N), Dim("M"))
_KV_IDX, _Q_POS = Index("kv_idx"), Index("q_pos")


@dataclass(frozen=True, slots=True)
class Decay:
    """A bias that falls with distance. load: of c at the key; slope: L, the steepest of the rest of the score
    by its product; share: what all keys that are left out weigh at most.
    """

    load: Load
    slope: float
    share: float

    @property
    def _rows(self) -> tuple[Expr, ...]:
        return self.load.indices[:-1]

    @property
    def is_of_head(self) -> bool:
        return any(node == Index("h") for index in self._rows for node in walk(index))

    def _at(self, position: Expr) -> Load:
        return Load(self.load.tensor, (*self._rows, position), self.load.extents, "float")

    def start(self) -> Expr:
        """Returns the first key that counts for a tile of queries from `q_lo` on; below 0 where the tile
        begins before the first key.
        """
        c = self._at(_FIRST)
        value = add(add(c, _margin()), mul(Call("abs", (c,)), Const(_ROUNDING)))
        return minimum(_FIRST, self._search("upper", value))

    def stop(self) -> Expr:
        """Returns the row behind the last one for which a tile of keys up to `kv_hi` counts."""
        last = Index("kv_hi")
        c = self._at(last)
        value = sub(sub(c, _margin()), mul(Call("abs", (c,)), Const(_ROUNDING)))
        return sub(add(maximum(add(last, Const(1)), self._search("lower", value)), Dim("M")), N)

    def _search(self, side: Literal["lower", "upper"], value: Expr) -> Search:
        return Search(side, self.load.tensor, self._rows, self.load.extents, value, descends=True)


def _margin() -> Load:
    return Load(MARGIN, (Index("b"), Index("h")), (Dim("B"), Dim("H")), "float")


def margin_of(decay: Decay) -> Margin:
    """Returns the tensor of margins as kernels take it, and what it is made by."""
    sizes = (Dim("B"), Dim("H"))
    arg = Arg(
        tensor=Tensor(name=MARGIN, dtype=DType.F32, shape=sizes),
        axes=tuple(Bind(expected=size) for size in sizes),
        strides=tuple(f"stride_{MARGIN}_{axis}" for axis in range(len(sizes))),
    )
    return Margin(arg=arg, slope=decay.slope, share=decay.share)


# --- finding it


@dataclass(frozen=True, slots=True)
class Why:
    """Why no key is left out for an input that descends."""

    tensor: Tensor
    reason: str


def check_decay(variant: Variant) -> Iterator[Diagnostic]:
    """Warns of an input that is said to descend, and of which nothing follows."""
    found = find_decay(normalise(variant.attention))
    if isinstance(found, Why) and found.tensor.span is not None:
        yield warning(
            "W0705",
            f"no tile is skipped because '{found.tensor.name}' descends",
            found.tensor.span,
            found.reason,
            notes=("the result is right, and costs what it would without the fact",),
            hints=(
                "of 'score = r + c[b, h, q_pos] - c[b, h, kv_idx]' under 'mask = causal' tiles are skipped",
            ),
        )


def decay_of(attention: Attention, inner: Axis) -> Decay | None:
    """Returns the decay by which a kernel of a normalised attention, whose inner loop runs over `inner`, ends
    its loops; None without one. A tile of keys serves all query heads that share them.
    """
    found = find_decay(attention)
    if not isinstance(found, Decay):
        return None
    return None if inner == "q" and found.is_of_head and kv_heads(attention) != Dim("H") else found


def find_decay(attention: Attention) -> Decay | Why | None:
    """Returns the decay of a normalised attention, or why an input that descends makes none; None where none
    descends.
    """
    tensor = next((tensor for tensor in attention.inputs if tensor.is_descending), None)
    if tensor is None:
        return None
    terms = list(_terms(simplify(attention.score)))
    ours = [(sign, term) for sign, term in terms if _loads(term, tensor.name)]
    rest = [term for _, term in terms if not _loads(term, tensor.name)]
    reason = _refuse(attention, tensor, ours, rest)
    if reason is not None:
        return Why(tensor, reason)
    load = next(term for sign, term in ours if sign < 0)
    slope = sum(slope for term in rest if (slope := _slope(term)) is not None)
    assert isinstance(load, Load)
    return Decay(load, slope, DType(attention.element).unit_roundoff / 8)


def _refuse(
    attention: Attention, tensor: Tensor, ours: list[tuple[int, Expr]], rest: list[Expr]
) -> str | None:
    name = tensor.name
    if not _is_difference(ours):
        return f"the score has no '+ {name}[..., q_pos] - {name}[..., kv_idx]'"
    load = ours[0][1]
    assert isinstance(load, Load)
    if load.extents[-1] != N:
        return f"the last axis of '{name}' is not N"
    pairs = zip(load.indices[:-1], load.extents[:-1], strict=True)
    if not all(_is_of_sequence(index) and lies_inside(index, extent) for index, extent in pairs):
        return f"the other indices of '{name}' are not 'b' and 'h'"
    if attention.softmax.form != "softmax":
        return "only a softmax divides by a sum that the query's own key is in"
    if not (is_plain(attention) and attention.k.axis(Role.BATCH) is not None):
        return "packed sequences and pages have no margins"
    if any("kv_idx" in uses(term) for term in rest):
        return "another term of the score depends on the key"
    if any(_slope(term) is None for term in rest):
        return "the product has a factor that is not a constant"
    _, must = classify(substitute(attention.mask, {_KV_IDX: _Q_POS}))
    if must != TRUE:
        return "the mask does not say that a query sees the key at its own position"
    return None


def _is_of_sequence(index: Expr) -> bool:
    return all(not isinstance(node, Index) or node.name in ("b", "h") for node in walk(index)) and not any(
        isinstance(node, Load) for node in walk(index)
    )


def _is_difference(ours: list[tuple[int, Expr]]) -> bool:
    match sorted(ours, key=lambda term: -term[0]):
        case [(1, Load(indices=(*rows, at))), (-1, Load(indices=(*others, key)))]:
            return rows == others and at == _Q_POS and key == _KV_IDX
        case _:
            return False


def _loads(term: Expr, name: str) -> bool:
    return any(isinstance(node, Load) and node.tensor == name for node in walk(term))


def _terms(expr: Expr, sign: int = 1) -> Iterator[tuple[int, Expr]]:
    match expr:
        case Binary(op="+" | "-" as op, left=left, right=right):
            yield from _terms(left, sign)
            yield from _terms(right, sign if op == "+" else -sign)
        case Neg(operand=operand):
            yield from _terms(operand, -sign)
        case _:
            yield sign, expr


#: Functions by their steepest slope.
_SLOPES = {"tanh": 1.0, "sigmoid": 0.25, "abs": 1.0, "sin": 1.0, "cos": 1.0, "erf": 1.13}
assert _SLOPES.keys() - {"abs"} <= REAL.keys()


def _slope(expr: Expr) -> float | None:
    if not any(isinstance(node, Dot) for node in walk(expr)):
        return 0.0
    match expr:
        case Dot():
            return 1.0
        case Neg(operand=operand):
            return _slope(operand)
        case Binary(op="+" | "-", left=left, right=right):
            return _both(left, right)
        case (
            Binary(op="*", left=Const(value=factor), right=other)
            | Binary(op="*", left=other, right=Const(value=factor))
        ):
            return None if (slope := _slope(other)) is None else abs(float(factor)) * slope
        case Binary(op="/", left=left, right=Const(value=divisor)) if divisor:
            return None if (slope := _slope(left)) is None else slope / abs(float(divisor))
        case Call(function="min" | "max", args=(left, right)):
            return _both(left, right)
        case Call(function=function, args=(operand,)) if function in _SLOPES:
            return None if (slope := _slope(operand)) is None else _SLOPES[function] * slope
        case _:
            return None


def _both(left: Expr, right: Expr) -> float | None:
    a, b = _slope(left), _slope(right)
    return None if a is None or b is None else a + b
