"""How far may generated gradients lie from the reference's? The forward's bound, carried through the chain
rule.

Derivatives of the score enter the bound through `expr.derive`;
the values that they are compared with do not.

The rounding of o is the largest error, and it reaches delta_i = do_i . o_i alone. Sums over many rows would
be hidden by the sum of all its sizes, but the do of `cotangents_of` are independent normal numbers that know
nothing of o's errors: sum_i c_i do_i . e_i is normal with variance sum_i c_i^2 |e_i|^2. Six of its standard
deviations bound it (one sum in 10^9 is larger), so that a gradient whose terms cancel is still known well.
A do that an expanded layout repeats is no such numbers: the errors of equal rows add up.

A row of which nothing is promised may have an o that is NaN, and with it delta_i. A weight of 0 times that is
NaN: nothing is promised either of what dS of the row reaches, keys that it does not see included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnc.expr.derive import derive
from attnc.expr.nodes import Expr, Index, Load, uses
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.plan.ir import ErrorBound
from attnc.plan.ir.backward import GradientBound
from attnc.reference import (
    Array,
    Bools,
    Floats,
    Head,
    Input,
    count_sharing,
    heads,
    own_rows,
    rows,
    softmax,
    to_arrays,
)
from attnc.reference_gradients import gradients
from attnc.verify.epilogue_bound import EpilogueErrors
from attnc.verify.running_error import FLUSHED, Approx, RunningError, U, exponential_error
from attnc.verify.stick_errors import StickErrors, sum_error
from attnc.verify.tolerance import (
    LARGEST_EXPONENT,
    SLACK,
    chain_error,
    dot_products,
    expected_rows,
    leaves_sticks_open,
    negligible,
    to_float64,
)
from attnc.verify.verdict import Verdict


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
    """Returns the reference and bound of every gradient. Tensors and cotangents as for
    `reference_gradients.gradients`; finite ones.
    """
    arrays = to_arrays(attention, tensors)
    given = {name: to_float64(value) for name, value in cotangents.items()}
    like = {name: arrays[name] for name in arrays.keys() & {"q", "k", "v", *attention.grads}}
    keys = (
        {head.b: head.shape[1] for head in heads(attention, arrays)} if attention.k.storage.is_paged else {}
    )
    sums = GradientErrors.zeros(
        bound,
        like,
        independent=not _repeats(given[attention.o.name]),
        shared=count_sharing(attention.k, arrays, keys),
    )
    with np.errstate(all="ignore"):
        for head in heads(attention, arrays):
            do = head.place(attention.o, given)
            dlse = np.zeros(head.shape[0])
            if attention.lse is not None and "lse" in given:
                dlse = head.place(attention.lse, given)[:, 0]
            epilogue = EpilogueErrors.of(head, do, bound)
            _errors_of(attention)(head, epilogue, dlse, bound).add_to(sums)
            epilogue.add_to(sums.rest)
        errors = {name: sums.total(name) for name in attention.grads}
    values = gradients(attention, tensors, cotangents)
    return {name: _expect(attention, name, values[name], errors[name]) for name in attention.grads}


def _repeats(x: Floats) -> bool:
    return any(x.shape[axis] > 1 and (x == x.take([0], axis)).all() for axis in range(x.ndim))


def _expect(attention: Attention, name: str, value: Floats, error: Floats) -> ExpectedGradient:
    dtype = DType(attention.tensor(name).dtype)
    smallest = max(dtype.smallest_subnormal / 2, FLUSHED)
    allowed = SLACK * (error + (dtype.unit_roundoff + 2 * U) * np.abs(value)) + 2 * smallest
    largest = LARGEST_F16 if dtype is DType.F16 else 3.38e38
    allowed = np.where(np.isfinite(allowed) & (np.abs(value) + allowed < largest), allowed, np.inf)
    return ExpectedGradient(value=value, allowed=allowed)


def judge_gradients(expected: Mapping[str, ExpectedGradient], found: Mapping[str, Input]) -> Verdict:
    """Returns every element of every gradient against its bound; those without one are counted."""
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
        open=sum(int(np.isinf(want.allowed).sum()) for want in expected.values()),
        ratios=ratios,
    )


def cotangents_of(
    attention: Attention, outputs: Mapping[str, Array], seed: int
) -> Iterator[tuple[str, Floats]]:
    """Yields random gradients of the outputs; those of lse are 0 where it is infinite."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, 1 << 20]))
    for tensor in attention.outputs:
        value = generator.standard_normal(outputs[tensor.name].shape)
        yield tensor.name, np.where(np.isfinite(outputs[tensor.name]), value, 0.0)


LARGEST_F16 = 65504.0
_DEVIATIONS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors:
    """Errors of every gradient, over all heads.

    rest: of all but delta's error from o; size: of that, at most; variance: of that, which says something
    where do is independent numbers. terms: magnitudes of what is added up in dk and dv; cut_off: what tensor
    cores lose of them (`tolerance.chain_error`). shared: how often a page is named, at most.
    """

    bound: GradientBound
    independent: bool
    shared: int
    rest: Mapping[str, Floats]
    size: Mapping[str, Floats]
    variance: Mapping[str, Floats]
    terms: Mapping[str, Floats]
    cut_off: Mapping[str, Floats]

    @staticmethod
    def zeros(
        bound: GradientBound, like: Mapping[str, Array], *, independent: bool, shared: int
    ) -> GradientErrors:
        def empty() -> dict[str, Floats]:
            return {name: np.zeros(x.shape) for name, x in like.items()}

        return GradientErrors(
            bound=bound,
            independent=independent,
            shared=shared,
            rest=empty(),
            size=empty(),
            variance=empty(),
            terms=empty(),
            cut_off=empty(),
        )

    def total(self, name: str) -> Floats:
        known = self.size[name]
        if self.independent:
            known = np.minimum(known, _DEVIATIONS * np.sqrt(self.variance[name]))
        return np.asarray(
            self.rest[name] + known + beyond_a_tile(self.bound, self.cut_off[name]) * self.terms[name]
        )


def beyond_a_tile(bound: GradientBound, cut_off: Floats) -> Floats:
    """Returns the error of a sum beyond that of the sum of one tile, which has 2u for each of its
    products.
    """
    return (cut_off - 2 * U * bound.tile).clip(0)


def _product_error(do: Floats, do_error: Floats, v: Floats, forward: ErrorBound) -> Floats:
    dot_error = forward.dot_error(v.shape[1])
    if forward.o_dtype is not forward.p_dtype:
        dot_error += DType(forward.p_dtype).unit_roundoff
    found: Floats = dot_error * (np.abs(do) @ np.abs(v).T) + do_error @ np.abs(v).T
    return found


@dataclass(frozen=True, slots=True)
class HeadErrors:
    """Probabilities, gradients of scores and their errors for some rows of one head, all [M, N].

    reached: where dS need not be 0, at visible keys, and at all keys of a row of which nothing is promised;
    ds_error: without what comes from o by delta; delta_size, delta_spread: that error of each row, at most,
    and its standard deviation. p, p_error: after dropout; probability: the largest that P may be taken for,
    before it.
    """

    head: Head
    bound: GradientBound
    do: Floats
    do_error: Floats
    dot: Approx
    reached: Bools
    p: Floats
    p_error: Floats
    ds: Floats
    ds_error: Floats
    delta_size: Floats
    delta_spread: Floats
    probability: Floats
    sink: tuple[float, float, float]

    @staticmethod
    def of(head: Head, epilogue: EpilogueErrors, dlse: Floats, bound: GradientBound) -> HeadErrors:
        do, do_error, forward = epilogue.do, epilogue.do_error, bound.forward
        o, lse = softmax(head)
        rows_of = expected_rows(head, forward)
        o_error, lse_error = rows_of["attention"].allowed, rows_of["lse"].allowed
        open_row = rows_of["lse"].open | ~np.isfinite(o).all(axis=1, keepdims=True)
        open_row = open_row | np.isinf(do_error).any(axis=1, keepdims=True)
        do_error = np.where(np.isinf(do_error), 0.0, do_error)
        _, dot = dot_products(head, forward)
        score = RunningError.of(head, dot, forward).analyse(head.attention.score)
        s = np.where(head.visible, np.broadcast_to(score.value, head.shape).astype(np.float64), -np.inf)
        seen: Bools = ~np.isneginf(s)
        row = np.where(np.isneginf(lse), 0.0, lse)[:, None]
        p = np.where(seen, np.exp(s - row), 0.0)
        exponent = np.abs(s - row) + np.abs(s) + 2 * np.abs(row)
        rho = np.where(seen, score.error + lse_error + U * (2 * exponent + 2 * forward.exp_ulps), 0.0)
        p_error = exponential_error(p, s - row, rho) + np.where(seen, FLUSHED, 0.0)
        p_error = np.maximum(p_error, negligible(p, forward))
        p_error = np.where(open_row | (s - row + rho >= LARGEST_EXPONENT), np.inf, p_error)
        p_error = np.where(head.visible, p_error, 0.0)

        drop, kept = head.dropout
        factor = np.where(kept, 1 / (1 - drop), 0.0) if drop < 1 else np.zeros(head.shape)
        dp = factor * (do @ head.v.T)
        dp_error = factor * _product_error(do, do_error, head.v, forward) + 2 * U * np.abs(dp)
        delta = (do * o).sum(axis=1) - dlse
        delta_size = (np.abs(do) * o_error).sum(axis=1)
        delta_spread = np.sqrt(((epilogue.slope * o_error) ** 2).sum(axis=1))
        delta_error = (head.v.shape[1] + 3) * U * np.abs(do * o).sum(axis=1)
        delta_error = delta_error + 2 * U * (np.abs(delta) + np.abs(dlse))
        delta_error = delta_error + (do_error * np.abs(o)).sum(axis=1)
        difference = dp - delta[:, None]
        weights, weights_error, near_zero = p, p_error, np.zeros(())
        if head.attention.softmax.form == "softpick":
            below, at_zero = s < 0, s == 0
            either = np.abs(difference) + np.abs(delta[:, None])  # which of both a score near 0 takes
            difference = np.where(at_zero, 0.0, np.where(below, delta[:, None], difference))
            is_exact = at_zero & (score.error == 0)  # of zeros alone: nothing is rounded, nothing is flushed
            unsure = head.visible & (np.abs(s) <= score.error + FLUSHED) & ~is_exact
            near_zero = np.where(unsure, (p + p_error) * either, 0.0)
            one = np.exp(-row)
            of_one = exponential_error(one, -row, lse_error + U * (2 * np.abs(row) + 2 * forward.exp_ulps))
            weights = np.where(head.visible, (p - one).clip(0), 0.0)
            weights_error = np.where(head.visible, p_error + of_one + U * (p + one), 0.0)
        ds = p * difference
        ds_error = p_error * np.abs(difference) + 3 * U * np.abs(ds)
        ds_error = ds_error + (p + p_error) * (dp_error + delta_error[:, None]) + near_zero

        sink = (0.0, 0.0, 0.0)
        if head.attention.softmax.sink is not None:
            exponent = np.where(np.isneginf(lse), -np.inf, head.sink - row[:, 0])
            weight = np.exp(exponent)
            relative = lse_error[:, 0] + U * (
                4 * np.abs(row[:, 0]) + 4 * abs(head.sink) + 2 * forward.exp_ulps
            )
            weight_error = exponential_error(weight, exponent, relative) + FLUSHED
            largest = weight + weight_error
            many = 2 * U * (bound.tile + len(do) + 8)
            of_rows = largest * delta_error + (weight_error + many * weight) * np.abs(delta)
            sink = (
                float(np.where(open_row[:, 0], np.inf, of_rows).sum()),
                float((largest * delta_size).sum()),
                float(((largest * delta_spread) ** 2).sum()),
            )
        return HeadErrors(
            head,
            bound,
            do,
            do_error,
            dot,
            head.visible | open_row,
            factor * weights,
            np.where(kept, factor * weights_error, 0.0),
            np.where(seen, ds, 0.0),
            np.where(open_row, np.inf, np.where(seen, ds_error, 0.0)),
            delta_size,
            delta_spread,
            np.where(seen, p + p_error, 0.0),
            sink,
        )

    @staticmethod
    def of_weights(head: Head, epilogue: EpilogueErrors, dlse: Floats, bound: GradientBound) -> HeadErrors:
        """The same where nothing is normalised: p is the weight, dS = dP, and there is no delta."""
        do, do_error, forward = epilogue.do, epilogue.do_error, bound.forward
        open_row = expected_rows(head, forward)["attention"].open.any(axis=1, keepdims=True)
        open_row = open_row | np.isinf(do_error).any(axis=1, keepdims=True)
        do_error = np.where(np.isinf(do_error), 0.0, do_error)
        _, dot = dot_products(head, forward)
        found = RunningError.of(head, dot, forward).analyse(head.attention.score)
        visible, nothing = head.visible, np.zeros(head.shape[0])
        p_error = np.where(visible, np.broadcast_to(found.error, head.shape), 0.0)
        dp = do @ head.v.T
        # what is below the normal numbers may be taken for 0, and slopes of weights may be large
        dp_error = _product_error(do, do_error, head.v, forward) + 4 * U * np.abs(dp) + FLUSHED
        return HeadErrors(
            head,
            bound,
            do,
            do_error,
            dot,
            visible | open_row,
            np.where(visible, np.abs(head.weights), 0.0),
            np.where(open_row, np.inf, p_error),
            np.where(visible, dp, 0.0),
            np.where(open_row, np.inf, np.where(visible, dp_error, 0.0)),
            nothing,
            nothing,
            np.zeros(head.shape),
            (0.0, 0.0, 0.0),
        )

    @staticmethod
    def of_sticks(head: Head, epilogue: EpilogueErrors, dlse: Floats, bound: GradientBound) -> HeadErrors:
        """The same of stick-breaking, where no delta comes from o."""
        do, do_error, forward = epilogue.do, epilogue.do_error, bound.forward
        size, dot = dot_products(head, forward)
        score = RunningError.of(head, dot, forward).analyse(head.attention.score)
        open_row = leaves_sticks_open(head, score, size, dot) | np.isinf(do_error).any(axis=1, keepdims=True)
        do_error = np.where(np.isinf(do_error), 0.0, do_error)
        of_tiles = replace(forward, tile_kv=bound.tile, splits=1)
        many = sum_error(of_tiles, -(-head.shape[1] // bound.min_tile))
        sticks = StickErrors.of(score, head.visible, forward, many, int(forward.exp_ulps) + 1)
        dp = do @ head.v.T
        dp_error = _product_error(do, do_error, head.v, forward) + 2 * U * np.abs(dp)
        ds, ds_error = sticks.differentiate(dp, dp_error, dlse)
        nothing = np.zeros(head.shape[0])
        return HeadErrors(
            head,
            bound,
            do,
            do_error,
            dot,
            head.visible | open_row,
            sticks.p,
            np.where(open_row, np.inf, np.where(sticks.seen, sticks.p_error + FLUSHED, 0.0)),
            np.where(open_row, 0.0, ds),
            np.where(open_row, np.inf, ds_error),
            nothing,
            nothing,
            np.zeros(head.shape),
            (0.0, 0.0, 0.0),
        )

    def add_to(self, sums: GradientErrors) -> None:
        head, bound, attention = self.head, self.bound, self.head.attention
        forward, group = bound.forward, max(self.head.dims["H"] // max(self.head.dims["Hkv"], 1), 1)
        m, n = head.shape
        if m == 0:
            return
        over_keys = 2 * U * (bound.tile + -(-n // bound.min_tile) + 8)
        # what is a key and a value gets two sums of each tile
        sums_of_tile = 2 if attention.v.storage.is_part else 1
        added = sums_of_tile * (bound.tile + -(-head.dims["M"] // bound.min_tile) * group)
        over_rows = 2 * U * (added + sums.shared + 7)
        derivative = derive(attention.score)
        slope = self._analyse(derivative.dot)
        d_dot = self.ds * slope.value
        element = DType(forward.input_dtype)
        rounded = np.abs(d_dot) * (element.unit_roundoff + forward.product_error + 2 * U)
        lost = abs(bound.scale) * max(element.smallest_subnormal / 2, FLUSHED)
        error = (
            self.ds_error * np.abs(slope.value) + (np.abs(self.ds) + self.ds_error) * slope.error + rounded
        )
        error = np.where(self.reached, error + lost, 0.0)
        weight = self.probability * np.abs(slope.value)
        by_delta = weight * self.delta_size[:, None]
        if element is DType.F16:
            largest = np.abs(d_dot) + error + by_delta
            error = np.where(largest > LARGEST_F16 * abs(bound.scale), np.inf, error)
        k_size, q_size = np.abs(head.k), np.abs(head.q)
        every = (sums.rest, sums.size, sums.variance, sums.terms, sums.cut_off)
        rest, size, variance, terms, cut_off = ({**head.arrays, **of} for of in every)
        dq, dq_size, dq_variance = (
            rows(attention.q, of, head.b)[head.first : head.first + m, head.h]
            for of in (rest, size, variance)
        )
        chained = beyond_a_tile(bound, chain_error(forward, head.visible))[:, None]
        dq += (error + (over_keys + chained) * np.abs(d_dot)) @ k_size
        dq_size += by_delta @ k_size
        dq_variance += ((weight @ k_size) * self.delta_spread[:, None]) ** 2
        by_keys = chain_error(forward, head.visible.T)[:, None]
        of_keys = (
            (rest, (error + over_rows * np.abs(d_dot)).T @ q_size),
            (size, by_delta.T @ q_size),
            (terms, np.abs(d_dot).T @ q_size),
            (cut_off, by_keys),
            (variance, ((weight * self.delta_spread[:, None]) ** 2).T @ (q_size * q_size)),
        )
        for of, given in of_keys:
            with own_rows(attention.k, of, head.b, n) as dk:
                dk[:, head.h // group] += given
        p_dtype = DType(forward.p_dtype)
        relative = p_dtype.unit_roundoff + forward.product_error + 2 * U + over_rows
        if forward.o_dtype is not forward.p_dtype:
            relative += p_dtype.unit_roundoff
        p_error = self.p_error + (self.p + self.p_error) * relative
        p_error += np.where(head.visible, max(p_dtype.smallest_subnormal / 2, FLUSHED), 0.0)
        of_values = (
            (rest, p_error.T @ np.abs(self.do) + (self.p + p_error).T @ self.do_error),
            (terms, self.p.T @ np.abs(self.do)),
            (cut_off, by_keys),
        )
        stored = attention.k if attention.v.storage.is_part else attention.v
        for of, given in of_values:
            with own_rows(stored, of, head.b, n) as dv:
                dv[:, head.h // group, : head.v.shape[1]] += given
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

    def _add_load(self, sums: GradientErrors, load: Load, value: Expr) -> None:
        slope = self._analyse(value)
        self._scatter(sums.rest[load.tensor], load, self._term(slope))
        weight = self.probability * slope.value
        sizes = np.abs(weight) * self.delta_size[:, None]
        self._scatter(sums.size[load.tensor], load, sizes)
        if not any("kv_idx" in uses(index) for index in load.indices):
            # One error of delta in all terms of a row: the terms may cancel.
            signs_differ = self.head.attention.softmax.form == "softpick"
            together = np.abs(weight).sum(axis=1) if signs_differ else np.abs(weight.sum(axis=1))
            spread = together * self.delta_spread
            first = np.zeros(self.head.shape)
            first[:, :1] = (spread**2)[:, None]
            self._scatter(sums.variance[load.tensor], load, first)
        elif Index("kv_idx") in load.indices:
            self._scatter(sums.variance[load.tensor], load, (weight * self.delta_spread[:, None]) ** 2)
        else:  # several keys of a row may read one element
            self._scatter(sums.variance[load.tensor], load, np.full(self.head.shape, np.inf))

    def _term(self, slope: Approx) -> Floats:
        m, n = self.head.dims["M"], self.head.shape[1]
        tiles = sum(-(-length // self.bound.min_tile) for length in (m, n))
        many = 2 * U * (2 * self.bound.tile + tiles + self.head.dims["B"] * self.head.dims["H"] + 8)
        error = self.ds_error * np.abs(slope.value) + (np.abs(self.ds) + self.ds_error) * (
            slope.error + 3 * U * np.abs(slope.value)
        )
        # dS, and then its product with the slope, may be below the normal numbers
        lost = np.where(self.reached, FLUSHED * (1 + np.abs(slope.value)), 0.0)
        return np.asarray(error + lost + many * np.abs(self.ds * slope.value))

    def _analyse(self, expr: Expr) -> Approx:
        found = RunningError.of(self.head, self.dot, self.bound.forward).analyse(expr)
        seen = self.head.visible & (self.ds != 0) | (self.ds_error > 0)
        value = np.where(seen, np.broadcast_to(found.value, self.head.shape).astype(np.float64), 0.0)
        error = np.where(found.overflows, np.inf, found.error)
        return Approx(value, np.where(seen, np.broadcast_to(error, self.head.shape), 0.0))

    def _scatter(self, target: Floats, load: Load, terms: Floats) -> None:
        if not load.indices:
            target += terms.sum()
            return
        indices = [np.broadcast_to(self.head.value(index), self.head.shape) for index in load.indices]
        inside: Array = np.ones(self.head.shape, dtype=np.bool_)
        for index, length in zip(indices, target.shape, strict=True):
            inside = inside & (index >= 0) & (index < length)
        np.add.at(target, tuple(index[inside] for index in indices), terms[inside])


def _errors_of(attention: Attention) -> Callable[[Head, EpilogueErrors, Floats, GradientBound], HeadErrors]:
    if attention.softmax.form == "stick_breaking":
        return HeadErrors.of_sticks
    return HeadErrors.of if attention.normalises else HeadErrors.of_weights
