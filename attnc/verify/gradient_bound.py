"""How far may generated gradients lie from the reference's? The forward's bound, carried through the chain
rule.

    P^ = exp2(s^ - lse^)        relative error  rho = e_s + e_lse + roundings of the exponent, once more
    dP^, delta^                 errors of a dot over Dv; delta also inherits the bound of o, which is rounded
    dS = P (dP - delta)         P rho |dP - delta| + P (E_dP + E_delta)
    d dot = dS * slope          E_dS |slope| + |dS| E_slope, then rounded to q's type
    dq, dk, dv, dx              sums of those errors times |K|, |Q|, |dO|, |d s / d x|, and of the partial
    sums'

First order, componentwise, like `tolerance` (Blanchard, Higham, Higham, arXiv 1909.03469). Derivatives of the
score enter the bound through `expr.derive`; the values that they are compared with do not.

The rounding of o is the largest error, and it reaches delta_i = do_i . o_i alone. Sums over many rows would
be hidden by the sum of all its sizes, but the do of `cotangents_of` are independent normal numbers that know
nothing of o's errors: sum_i c_i do_i . e_i is normal with variance sum_i c_i^2 |e_i|^2. Six of its standard
deviations bound it (one sum in 10^9 is larger), so that a gradient whose terms cancel is still known well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from attnc.expr.derive import derive
from attnc.expr.nodes import Expr, Index, Load, uses
from attnc.model.attention import Attention
from attnc.model.tensors import DType
from attnc.plan.ir_backward import GradientBound
from attnc.reference import Array, Bools, Floats, Head, Input, heads, rows, softmax, to_arrays
from attnc.reference_gradients import gradients
from attnc.verify.running_error import Approx, RunningError, U
from attnc.verify.tolerance import SLACK, Verdict, expected_rows, to_float64

_FLUSHED = 2.0**-126
_LARGEST_F16 = 65504.0
_DEVIATIONS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGradient:
    """value: the reference; allowed: the bound on |gradient - value|, infinite where nothing is promised."""

    value: Floats
    allowed: Floats


def expect_gradients(
    attention: Attention,
    tensors: Mapping[str, Input],
    cotangents: Mapping[str, Input],
    bound: GradientBound,
) -> dict[str, ExpectedGradient]:
    """Reference and bound of every gradient. Tensors and cotangents as for `reference_gradients.gradients`;
    finite ones.
    """
    arrays = to_arrays(attention, tensors)
    given = {name: to_float64(value) for name, value in cotangents.items()}
    sums = _Sums.zeros({name: arrays[name] for name in {"q", "k", "v", *attention.grads}})
    with np.errstate(all="ignore"):
        for head in heads(attention, arrays):
            do = head.place(attention.o, given)
            dlse = np.zeros(head.shape[0])
            if attention.lse is not None and "lse" in given:
                dlse = head.place(attention.lse, given)[:, 0]
            _Errors.of(head, do, dlse, bound).add_to(sums)
        errors = {name: sums.total(name) for name in attention.grads}
    values = gradients(attention, tensors, cotangents)
    return {name: _expected(attention, name, values[name], errors[name]) for name in attention.grads}


@dataclass(frozen=True, slots=True)
class _Sums:
    """Errors of every gradient: of all but delta's error from o, the size of that, and its variance."""

    rest: Mapping[str, Floats]
    size: Mapping[str, Floats]
    variance: Mapping[str, Floats]

    @staticmethod
    def zeros(like: Mapping[str, Array]) -> _Sums:
        return _Sums(*({name: np.zeros(x.shape) for name, x in like.items()} for _ in range(3)))

    def total(self, name: str) -> Floats:
        known = np.minimum(self.size[name], _DEVIATIONS * np.sqrt(self.variance[name]))
        return np.asarray(self.rest[name] + known)


def _expected(attention: Attention, name: str, value: Floats, error: Floats) -> ExpectedGradient:
    dtype = DType(attention.tensor(name).dtype)
    smallest = max(dtype.smallest_subnormal / 2, _FLUSHED)
    allowed = SLACK * (error + (dtype.unit_roundoff + 2 * U) * np.abs(value)) + 2 * smallest
    largest = _LARGEST_F16 if dtype is DType.F16 else 3.38e38
    allowed = np.where(np.isfinite(allowed) & (np.abs(value) + allowed < largest), allowed, np.inf)
    return ExpectedGradient(value=value, allowed=allowed)


def judge_gradients(expected: Mapping[str, ExpectedGradient], found: Mapping[str, Input]) -> Verdict:
    """Every element of every gradient against its bound."""
    ratios, failures, wheres = {}, [], {}
    for name, want in expected.items():
        got = to_float64(found[name])
        if got.shape != want.value.shape:
            failures.append(f"d{name} has shape {got.shape}, not {want.value.shape}")
            continue
        with np.errstate(all="ignore"):
            ratio = np.where(np.isinf(want.allowed), 0.0, np.abs(got - want.value) / want.allowed)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        at = np.unravel_index(int(ratio.argmax()), ratio.shape) if ratio.size else ()
        ratios[f"d{name}"] = float(ratio[at]) if ratio.size else 0.0
        wheres[f"d{name}"] = f"d{name}[{', '.join(map(str, map(int, at)))}]"
        if ratios[f"d{name}"] > 1:
            failures.append(
                f"{wheres[f'd{name}']} = {got[at]:.9g}, expected {want.value[at]:.9g} "
                f"+- {want.allowed[at]:.3g} ({int((ratio > 1).sum())} of {ratio.size} elements are off)"
            )
    worst = max(ratios, key=lambda name: ratios[name], default="")
    return Verdict(
        ok=not failures,
        message="; ".join(failures) or "within the bound",
        worst=max(ratios.values(), default=0.0) if not failures or ratios else float("inf"),
        where=wheres.get(worst, ""),
        ratios=ratios,
    )


@dataclass(frozen=True, slots=True)
class _Errors:
    """Probabilities, gradients of scores and their errors for some rows of one head, all [M, N].

    ds_error: without what comes from o by delta; delta_size, delta_spread: that error of each row, at most,
    and its standard deviation.
    """

    head: Head
    bound: GradientBound
    do: Floats
    dot: Approx
    p: Floats
    p_error: Floats
    ds: Floats
    ds_error: Floats
    delta_size: Floats
    delta_spread: Floats
    probability: Floats
    sink: tuple[float, float, float]

    @staticmethod
    def of(head: Head, do: Floats, dlse: Floats, bound: GradientBound) -> _Errors:
        forward = bound.forward
        o, lse = softmax(head)
        rows_of = expected_rows(head, forward)
        o_error, lse_error = rows_of["o"].allowed, rows_of["lse"].allowed
        open_row = rows_of["lse"].open | ~np.isfinite(o).all(axis=1, keepdims=True)
        size = np.abs(head.q) @ np.abs(head.k).T
        rounding = forward.dot_error(head.q.shape[1])
        dot = Approx(head.q @ head.k.T, rounding * size)
        score = RunningError(head, dot, dict(forward.intrinsics)).analyse(head.attention.score)
        s = np.where(head.visible, np.broadcast_to(score.value, head.shape).astype(np.float64), -np.inf)
        seen: Bools = ~np.isneginf(s)
        row = np.where(np.isneginf(lse), 0.0, lse)[:, None]
        p = np.where(seen, np.exp(s - row), 0.0)
        exponent = np.abs(s - row) + np.abs(s) + 2 * np.abs(row)
        rho = np.where(seen, score.error + lse_error + U * (2 * exponent + 2 * forward.exp_ulps), 0.0)
        p_error = np.where(open_row, np.inf, p * np.expm1(rho) + np.where(seen, _FLUSHED, 0.0))

        drop, kept = head.dropout
        factor = np.where(kept, 1 / (1 - drop), 0.0) if drop < 1 else np.zeros(head.shape)
        products = np.abs(do) @ np.abs(head.v).T
        dp = factor * (do @ head.v.T)
        dot_error = forward.dot_error(head.v.shape[1])
        if forward.o_dtype is not forward.p_dtype:  # do is rounded to v's type
            dot_error += DType(forward.p_dtype).unit_roundoff
        dp_error = factor * dot_error * products + 2 * U * np.abs(dp)
        delta = (do * o).sum(axis=1) - dlse
        delta_size = (np.abs(do) * o_error).sum(axis=1)
        delta_spread = np.sqrt((o_error * o_error).sum(axis=1))
        delta_error = (head.v.shape[1] + 3) * U * np.abs(do * o).sum(axis=1)
        delta_error = delta_error + 2 * U * (np.abs(delta) + np.abs(dlse))
        difference = dp - delta[:, None]
        ds = p * difference
        ds_error = p_error * np.abs(difference) + p * (dp_error + delta_error[:, None]) + 3 * U * np.abs(ds)

        sink = (0.0, 0.0, 0.0)
        if head.attention.softmax.sink is not None:
            weight = np.exp(head.sink - row[:, 0]) * ~np.isneginf(lse)
            relative = lse_error[:, 0] + U * (
                4 * np.abs(row[:, 0]) + 4 * abs(head.sink) + 2 * forward.exp_ulps
            )
            terms = weight * np.abs(delta)
            many = 2 * U * (bound.tile + len(terms) + 8)
            sink = (
                float((weight * delta_error + terms * (relative + many)).sum()),
                float((weight * delta_size).sum()),
                float(((weight * delta_spread) ** 2).sum()),
            )
        return _Errors(
            head,
            bound,
            do,
            dot,
            factor * p,
            factor * p_error,
            np.where(seen, ds, 0.0),
            np.where(seen, ds_error, 0.0),
            delta_size,
            delta_spread,
            p,
            sink,
        )

    def add_to(self, sums: _Sums) -> None:
        """Adds what these rows contribute to the error of every gradient."""
        head, bound, attention = self.head, self.bound, self.head.attention
        forward, group = bound.forward, max(self.head.dims["H"] // max(self.head.dims["Hkv"], 1), 1)
        m, n = head.shape
        if m == 0:
            return
        over_keys = 2 * U * (bound.tile + -(-n // bound.min_tile) + 8)
        over_rows = 2 * U * (bound.tile + (-(-head.dims["M"] // bound.min_tile)) * group + 8)
        derivative = derive(attention.score)
        slope = self._analyse(derivative.dot)
        d_dot = self.ds * slope.value
        element = DType(forward.input_dtype)
        rounded = np.abs(d_dot) * (element.unit_roundoff + forward.product_error + 2 * U)
        lost = abs(bound.scale) * max(element.smallest_subnormal / 2, _FLUSHED)
        error = self.ds_error * np.abs(slope.value) + np.abs(self.ds) * slope.error + rounded
        error = np.where(head.visible, error + lost, 0.0)
        weight = self.probability * np.abs(slope.value)
        by_delta = weight * self.delta_size[:, None]
        if element is DType.F16:
            largest = np.abs(d_dot) + error + by_delta
            error = np.where(largest > _LARGEST_F16 * abs(bound.scale), np.inf, error)
        k_size, q_size = np.abs(head.k), np.abs(head.q)
        rest, size, variance = ({**head.arrays, **of} for of in (sums.rest, sums.size, sums.variance))
        dq, dq_size, dq_variance = (
            rows(attention.q, of, head.b)[head.first : head.first + m, head.h]
            for of in (rest, size, variance)
        )
        dk, dk_size, dk_variance = (
            rows(attention.k, of, head.b)[:n, head.h // group] for of in (rest, size, variance)
        )
        dv = rows(attention.v, rest, head.b)[:n, head.h // group]
        dq += (error + over_keys * np.abs(d_dot)) @ k_size
        dq_size += by_delta @ k_size
        dq_variance += ((weight @ k_size) * self.delta_spread[:, None]) ** 2
        dk += (error + over_rows * np.abs(d_dot)).T @ q_size
        dk_size += by_delta.T @ q_size
        dk_variance += ((weight * self.delta_spread[:, None]) ** 2).T @ (q_size * q_size)
        p_dtype = DType(forward.p_dtype)
        relative = p_dtype.unit_roundoff + forward.product_error + 2 * U + over_rows
        if forward.o_dtype is not forward.p_dtype:
            relative += p_dtype.unit_roundoff
        p_error = self.p_error + self.p * relative
        p_error += np.where(head.visible, max(p_dtype.smallest_subnormal / 2, _FLUSHED), 0.0)
        dv += p_error.T @ np.abs(self.do)
        for load, value in derivative.loads:
            if load.tensor in attention.grads:
                self._add_load(sums, load, value)
        sink = attention.softmax.sink
        if sink is not None:
            for load, value in derive(sink).loads:
                if load.tensor in attention.grads:
                    factor = 2 * abs(float(head.value(value).item()))
                    at = tuple(int(head.value(index).item()) for index in load.indices)
                    sums.rest[load.tensor][at] += factor * self.sink[0]
                    sums.size[load.tensor][at] += factor * self.sink[1]
                    sums.variance[load.tensor][at] += factor**2 * self.sink[2]

    def _add_load(self, sums: _Sums, load: Load, value: Expr) -> None:
        """The errors of what all scores add to the gradient of a load."""
        slope = self._analyse(value)
        self._scatter(sums.rest[load.tensor], load, self._term(slope))
        weight = self.probability * slope.value
        sizes = np.abs(weight) * self.delta_size[:, None]
        self._scatter(sums.size[load.tensor], load, sizes)
        if not any("kv_idx" in uses(index) for index in load.indices):
            # One error of delta in all terms of a row: the terms may cancel.
            spread = np.abs(weight.sum(axis=1)) * self.delta_spread
            first = np.zeros(self.head.shape)
            first[:, :1] = (spread**2)[:, None]
            self._scatter(sums.variance[load.tensor], load, first)
        elif Index("kv_idx") in load.indices:
            self._scatter(sums.variance[load.tensor], load, (weight * self.delta_spread[:, None]) ** 2)
        else:  # several keys of a row may read one element
            self._scatter(sums.variance[load.tensor], load, np.full(self.head.shape, np.inf))

    def _term(self, slope: Approx) -> Floats:
        """The error of what each score adds, but for delta's from o."""
        m, n = self.head.dims["M"], self.head.shape[1]
        tiles = sum(-(-length // self.bound.min_tile) for length in (m, n))
        many = 2 * U * (2 * self.bound.tile + tiles + self.head.dims["B"] * self.head.dims["H"] + 8)
        error = self.ds_error * np.abs(slope.value) + np.abs(self.ds) * (
            slope.error + 3 * U * np.abs(slope.value)
        )
        return np.asarray(error + many * np.abs(self.ds * slope.value))

    def _analyse(self, expr: Expr) -> Approx:
        """A derivative and its error; 0 where the score is masked, whatever the expression is there."""
        found = RunningError(self.head, self.dot, dict(self.bound.forward.intrinsics)).analyse(expr)
        seen = self.head.visible & (self.ds != 0) | (self.ds_error > 0)
        value = np.where(seen, np.broadcast_to(found.value, self.head.shape).astype(np.float64), 0.0)
        return Approx(value, np.where(seen, np.broadcast_to(found.error, self.head.shape), 0.0))

    def _scatter(self, target: Floats, load: Load, terms: Floats) -> None:
        """Adds terms [M, N] where the load points, except outside its tensor."""
        if not load.indices:
            target += terms.sum()
            return
        indices = [np.broadcast_to(self.head.value(index), self.head.shape) for index in load.indices]
        inside: Array = np.ones(self.head.shape, dtype=np.bool_)
        for index, length in zip(indices, target.shape, strict=True):
            inside = inside & (index >= 0) & (index < length)
        np.add.at(target, tuple(index[inside] for index in indices), terms[inside])


def cotangents_of(
    attention: Attention, outputs: Mapping[str, Array], seed: int
) -> Iterator[tuple[str, Floats]]:
    """Random gradients of the outputs; those of lse are 0 where it is infinite."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, 1 << 20]))
    for tensor in attention.outputs:
        value = generator.standard_normal(outputs[tensor.name].shape)
        yield tensor.name, np.where(np.isfinite(outputs[tensor.name]), value, 0.0)
