"""Gradients of the reference, in float64: what `grad q, k, v, ...` means.

    P_ij   = exp(s_ij - lse_i)                       for the keys j that row i may see, else 0
    dP_ij  = keep_ij / (1 - p) * (do_i . v_j)        dS_ij = P_ij (dP_ij - delta_i + dlse_i)
    delta_i = sum_j P_ij dP_ij                       dv_j  = sum_i keep_ij / (1 - p) P_ij do_i
    dq_i = sum_j dS_ij (d s_ij / d dot) k_j          dk_j  = sum_i dS_ij (d s_ij / d dot) q_i
    dx[at] = sum of dS_ij (d s_ij / d x[at])         dsink = sum_i exp(sink - lse_i) (dlse_i - delta_i)

Of other forms P and dS come from automatic differentiation of their definition.

With an epilogue o = f(a, x), do above is that of the attention, do_id (d o_id / d a_id), and
dx[at] = sum of do_id (d o_id / d x[at]) is added. Without a normalization P_ij is the score itself, and
dS_ij = dP_ij.

Where v is the first columns of k, those of dk have dv added to them. A page of k and v has the sum of the
gradients of all keys that it holds, once for each sequence and place whose table names it.

The derivatives of the score come from PyTorch's automatic differentiation of a float64 evaluation on the
visible pairs alone, so that a masked key has no part in anything; they share nothing with `expr.derive`.
Rows that see no key, and pairs that are masked, have gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from attnc.expr.nodes import (
    COLUMN,
    And,
    Attended,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    Load,
    Neg,
    Not,
    Or,
)
from attnc.model.attention import EPSILON, Attention, Form
from attnc.reference import Array, Floats, Head, Input, heads, own_rows, rows, softmax, to_arrays

Values = torch.Tensor


def gradients(
    attention: Attention, tensors: Mapping[str, Input], cotangents: Mapping[str, Input]
) -> dict[str, Floats]:
    """Returns the gradients of sum(do * o) + sum(dlse * lse) with respect to the inputs in `attention.grads`,
    float64.

    cotangents: "o", and "lse" where it is wanted, in the declared layouts. ValueError if shapes disagree.
    """
    arrays = to_arrays(attention, tensors)
    given = {name: _float64(value) for name, value in cotangents.items()}
    stored = arrays.keys() & {"q", "k", "v", *attention.grads}
    found = {name: np.zeros(arrays[name].shape) for name in stored}
    for head in heads(attention, arrays):
        do = head.place(attention.o, given)
        dlse = np.zeros(head.shape[0])
        if attention.lse is not None and "lse" in given:
            dlse = head.place(attention.lse, given)[:, 0]
        with np.errstate(all="ignore"):  # scores may be NaN
            _Pieces(head, _through_epilogue(head, do, found, attention.grads), dlse).add_to(found)
    return {name: found[name] for name in attention.grads}


def _float64(value: Input) -> Floats:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def _through_epilogue(head: Head, do: Floats, found: Mapping[str, Floats], wanted: tuple[str, ...]) -> Floats:
    """Returns the gradient of the attention [M, Dv], from that of o; adds those of what an epilogue loads."""
    epilogue = head.attention.epilogue
    if epilogue is None:
        return do
    attended, _ = softmax(head)
    i, d = (at.ravel() for at in np.indices(attended.shape))
    slopes = _Slopes(head, i, d)
    _, by_attention, by_load = slopes.value_and_slopes(epilogue, attended[i, d], wanted)
    given = np.asarray(do, np.float64)[i, d]
    for name, contribute in by_load.items():
        found[name][...] += contribute(given)
    return np.asarray((given * by_attention).reshape(attended.shape))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Some rows of one query head, with the gradients of their outputs: do [M, Dv], dlse [M]."""

    head: Head
    do: Floats
    dlse: Floats

    def add_to(self, found: Mapping[str, Floats]) -> None:
        head, attention = self.head, self.head.attention
        i, j = np.nonzero(head.visible)
        products = (head.q @ head.k.T)[i, j]
        s, d_dot, d_loads = _Slopes(head, i, j).value_and_slopes(attention.score, products, attention.grads)
        drop, kept = head.dropout
        factor = np.where(kept[i, j], 1 / (1 - drop), 0.0) if drop < 1 else np.zeros(len(i))
        dp = factor * (self.do @ head.v.T)[i, j]
        lse, delta = self._lse(s, i), np.zeros(head.shape[0])
        ds: Floats = dp
        if attention.softmax.form in _FORMS:
            p, ds = self._differentiate(_FORMS[attention.softmax.form], s, dp, i, j)
        elif attention.normalises:
            p = np.exp(s - lse[i], where=~np.isneginf(s), out=np.zeros_like(s))
            delta = np.asarray(np.bincount(i, p * dp, minlength=head.shape[0]), np.float64)
            ds = p * (dp - delta[i] + self.dlse[i])
        else:
            p = s
        group, views = max(head.dims["H"] // max(head.dims["Hkv"], 1), 1), {**head.arrays, **found}
        dq = rows(attention.q, views, head.b)[head.first : head.first + head.shape[0], head.h]
        _add_rows(dq, i, ds * d_dot, j, head.k)
        columns, kv, n = head.v.shape[1], head.h // group, head.shape[1]
        with own_rows(attention.k, views, head.b, n) as dk:
            _add_rows(dk[:, kv], j, ds * d_dot, i, head.q)
            if attention.v.storage.is_part:
                _add_rows(dk[:, kv, :columns], j, factor * p, i, self.do)
        if not attention.v.storage.is_part:
            with own_rows(attention.v, views, head.b, n) as dv:
                _add_rows(dv[:, kv], j, factor * p, i, self.do)
        for name, contribute in d_loads.items():
            found[name][...] += contribute(ds)
        if attention.softmax.sink is not None:
            weight = np.exp(head.sink - lse, where=~np.isneginf(lse), out=np.zeros_like(lse))
            d_sink = float((weight * (self.dlse - delta)).sum())
            for name, slope in _sink_slopes(head, attention.grads).items():
                found[name][...] += d_sink * slope

    def _differentiate(
        self,
        form: Callable[[Values, Values], tuple[Values, Values]],
        s: Floats,
        dp: Floats,
        i: Array,
        j: Array,
    ) -> tuple[Floats, Floats]:
        """Returns weights, and gradients of scores, of the visible pairs, by automatic differentiation. form:
        the weights [M, N] and lse [M] of scores and of which are visible, both [M, N].
        """
        at = (torch.from_numpy(i), torch.from_numpy(j))
        leaf = torch.from_numpy(s).requires_grad_()
        scores = torch.zeros(self.head.shape, dtype=torch.float64).index_put(at, leaf)
        visible = torch.zeros(self.head.shape, dtype=torch.bool).index_put(at, torch.tensor(True))
        weights, lse = form(scores, visible)
        whole = (weights[at] * torch.from_numpy(dp)).sum() + (lse * torch.from_numpy(self.dlse)).sum()
        return weights[at].detach().numpy(), _pull_back(whole, leaf, torch.ones_like(whole))

    def _lse(self, s: Floats, i: Array) -> Floats:
        m = np.full(self.head.shape[0], self.head.sink)
        np.maximum.at(m, i, s)
        shift = np.where(np.isneginf(m), 0.0, m)
        total = np.exp(self.head.sink - shift)
        np.add.at(total, i, np.exp(s - shift[i]))
        return np.asarray(np.log(total) + shift)


def _pick(scores: Values, visible: Values) -> tuple[Values, Values]:
    if not scores.shape[1]:
        return scores, scores.sum(dim=1)
    m = scores.detach().amax(dim=1, keepdim=True).clamp(min=0)
    terms = torch.where(visible, torch.exp(scores - m) - torch.exp(-m), torch.zeros_like(scores))
    total = terms.abs().sum(dim=1, keepdim=True) + EPSILON * torch.exp(-m)
    return torch.relu(terms) / total, (total.log() + m)[:, 0]


def _break(scores: Values, visible: Values) -> tuple[Values, Values]:
    left = torch.where(visible, torch.logaddexp(scores, torch.zeros_like(scores)), torch.zeros_like(scores))
    behind = left.flip(1).cumsum(1).flip(1)
    weights = torch.where(visible, torch.exp(scores - behind), torch.zeros_like(scores))
    return weights, -left.sum(dim=1)


#: Weights and lse of scores, and of which of them are visible, where derivatives are those of PyTorch.
_FORMS: Mapping[Form, Callable[[Values, Values], tuple[Values, Values]]] = {
    "softpick": _pick,
    "stick_breaking": _break,
}


def _add_rows(into: Floats, to: Array, weights: Floats, of: Array, given: Floats) -> None:
    """Adds weights[n] * given[of[n]] to into[to[n]] for every n, of which no two have the same `to` and
    `of`.
    """
    is_read = np.zeros((len(given), 1), dtype=np.bool_)
    is_read[of] = True
    read = np.where(is_read, given, 0.0)
    if np.isfinite(read).all():
        matrix = np.zeros((len(into), len(given)))
        matrix[to, of] = weights
        into += matrix @ read
    else:  # whose product with a weight of 0, of a pair that is none, would be NaN
        np.add.at(into, to, weights[:, None] * given[of])


@dataclass(slots=True)
class _Slopes:
    """Scores of some pairs (i, j) of one head, one by one, for automatic differentiation; of an epilogue,
    what it makes of the row i and column j of the attention.
    """

    head: Head
    i: Array
    j: Array
    leaves: dict[str, Values] = field(default_factory=dict)
    dot: Values | None = None

    def value_and_slopes(
        self, expr: Expr, given: Floats, wanted: tuple[str, ...]
    ) -> tuple[Floats, Floats, dict[str, Callable[[Floats], Floats]]]:
        """Returns the expression's values, its derivatives by `given` (the products, or the attention), and
        functions that pull gradients of the values back to what it loads.
        """
        self.dot = torch.from_numpy(given).requires_grad_()
        score = self.evaluate(expr).expand(len(self.i))
        if not score.requires_grad:
            score = score + 0 * self.dot
        slope = _pull_back(score, self.dot, torch.ones_like(score))

        def pull(leaf: Values) -> Callable[[Floats], Floats]:
            return lambda ds: _pull_back(score, leaf, torch.from_numpy(ds))

        loads = {name: pull(leaf) for name, leaf in self.leaves.items() if name in wanted}
        return score.detach().numpy(), slope, loads

    def evaluate(self, expr: Expr) -> Values:
        match expr:
            case Const(value=value):
                dtype = torch.float64 if expr.type == "float" else None
                return torch.tensor(value, dtype=dtype)
            case Dim(name=name):
                return torch.tensor(self.head.dims[name])
            case Index(name=name):
                return self._index(name)
            case Dot() | Attended():
                assert self.dot is not None
                return self.dot
            case Load():
                return self._load(expr)
            case Neg(operand=operand):
                return -self.evaluate(operand)
            case Not(operand=operand):
                return ~self.evaluate(operand)
            case And(operands=operands) | Or(operands=operands):
                first, *others = (self.evaluate(operand) for operand in operands)
                for other in others:
                    first = first & other if isinstance(expr, And) else first | other
                return first
            case Binary(left=left, right=right):
                return _binary(expr, self.evaluate(left), self.evaluate(right))
            case Compare(op=op, left=left, right=right):
                return _COMPARE[op](self.evaluate(left), self.evaluate(right))
            case Call(function=function, args=args):
                return _call(function, [self.evaluate(arg) for arg in args])
            case _:
                raise ValueError(f"{expr} has no value")

    def _index(self, name: str) -> Values:
        head = self.head
        if name in ("b", "h"):
            return torch.tensor(head.b if name == "b" else head.h)
        if name in ("kv_idx", COLUMN):
            return torch.from_numpy(self.j)
        shift = head.dims["N"] - head.dims["M"] if name == "q_pos" else 0
        return torch.from_numpy(self.i + head.first + shift)

    def _load(self, expr: Load) -> Values:
        if expr.tensor not in self.leaves:
            leaf = torch.from_numpy(np.array(self.head.arrays[expr.tensor]))
            leaf = leaf.long() if leaf.dtype in (torch.int32, torch.uint8) else leaf  # nothing wraps
            self.leaves[expr.tensor] = leaf.requires_grad_() if leaf.is_floating_point() else leaf
        leaf = self.leaves[expr.tensor]
        if leaf.numel() == 0:
            return torch.zeros((), dtype=leaf.dtype)
        indices = [self.evaluate(index) for index in expr.indices]
        sizes = [self.evaluate(extent) for extent in expr.extents]
        inside = torch.tensor(True)
        for index, size in zip(indices, sizes, strict=True):
            inside = inside & (index >= 0) & (index < size)
        clamped = [index.clamp(0, n - 1) for index, n in zip(indices, leaf.shape, strict=True)]
        return torch.where(inside, leaf[tuple(clamped)], torch.zeros((), dtype=leaf.dtype))


def _sink_slopes(head: Head, wanted: tuple[str, ...]) -> dict[str, Floats]:
    assert head.attention.softmax.sink is not None
    scores = _Slopes(head, np.zeros(0, np.int64), np.zeros(0, np.int64))
    sink = scores.evaluate(head.attention.softmax.sink)
    leaves = {name: leaf for name, leaf in scores.leaves.items() if name in wanted}
    if not leaves:
        return {}
    found = torch.autograd.grad(sink.sum(), list(leaves.values()))
    return {name: slope.numpy() for name, slope in zip(leaves, found, strict=True)}


def _pull_back(score: Values, leaf: Values, ds: Values) -> Floats:
    found: tuple[Values | None, ...] = torch.autograd.grad(
        score, leaf, ds, retain_graph=True, allow_unused=True
    )
    return np.zeros(leaf.shape) if found[0] is None else found[0].numpy()


_COMPARE: Mapping[str, Callable[[Values, Values], Values]] = {
    "==": torch.eq, "!=": torch.ne, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge,
}  # fmt: skip


def _binary(expr: Binary, left: Values, right: Values) -> Values:
    if expr.type == "float":
        left, right = left.double(), right.double()
    match expr.op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right
        case "//" | "%":
            safe = torch.where(right == 0, torch.ones_like(right), right)
            quotient = torch.div(left, safe, rounding_mode="floor")
            value = quotient if expr.op == "//" else left - quotient.detach() * safe
            return torch.where(right == 0, torch.zeros_like(value), value)


def _call(function: str, args: list[Values]) -> Values:
    if function == "where":
        condition, then, other = args
        return torch.where(condition, then, other)
    x = args[0]
    match function:
        case "bit":
            digits = torch.div(x, 2 ** args[1].clamp(0, 62), rounding_mode="floor") % 2 == 1
            is_set = torch.where(args[1] == 63, x < 0, digits)
            return is_set & (args[1] >= 0) & (args[1] <= 63)
        case "abs":
            return x.abs()
        case "min" | "max":
            y = args[1]
            if x.is_floating_point() or y.is_floating_point():
                x, y = x.double(), y.double()
            takes_x = (
                x <= y if function == "min" else x >= y
            )  # torch.minimum would halve the gradient of ties
            return torch.where(takes_x, x, y)
        case _:
            found: Values = getattr(torch, function)(x.double())  # torch has all of them by these names
            return found
