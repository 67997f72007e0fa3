"""How far may a right kernel be from the reference? The componentwise bound that the plan promises, and the
verdict on outputs.

Forward analysis of a tiled softmax in float32 (Blanchard, Higham, Higham, "Accurately computing
the log-sum-exp and softmax functions", arXiv 1909.03469, plus the standard bounds for dot products and
sums), for any score expression:

    e_ij = error of s_ij (see `running_error`) + u (2 (m_i - s_ij) + 2 |m_i| + 2 exp_ulps)
    E_i  = log sum_j P_ij exp(e_ij)             sum_j P_ij e_ij, and more where scores are wrong by 1 or more
    X_ij = min(exp(s_ij - L_i + e_ij + E_i) - P_ij, 1)       P_ij (e_ij + E_i) where that is small
    W_ij = keep_ij / (1 - p) (X_ij + P_ij (2u (tile_kv + T + 2 splits + 8) + u_p))
    B_id = sum_j W_ij |V_jd| + delta_p max_j P_ij sum_(j visible) |V_jd| + u_o |R_id|
           + tail (max_j |V_jd| + |R_id|)
    |O - R| <= 1.05 B + 2 delta_o, element by element
    |L' - L| <= E_i + 2u (tile_kv + T + 2 splits + 8) + 2u (|L| + |m|) + tail

The sums' 2u are one for the denominator and one for o. Where all keys pass through one sum of the tensor
cores (`plan.error_bound`), o has, in place of u tile_kv, the larger of that and 3/2 u min(2n, N + 4), for n
visible keys among N from the first to the last of them. The denominator, and with it L, is summed by ordinary
additions tile by tile. A scale c of v, itself wrong by d, multiplies the row once more: |c| B + (d + u |c|)
(|R| + B) is in the place of B's terms but the last two, which are of c R. A scale c_j of each key multiplies
P_ij in place of that, before it is rounded: W_ij is |c_j| times as large, and P_ij (d_j + u |c_j|) more;
|V_jd| in B's tail is |c_j V_jd|. Keys and values of 8 bits add nothing: their conversion to the type of q is
exact. An epilogue starts from R and B without u_o (of the attention, in float32) and has a running error of
its own, to which the rounding of o is added.

u = 2^-24; u_p, u_o: unit roundoff of the types of P and O; T: number of KV tiles; delta: half the smallest
subnormal, at least 2^-126 because GPUs may flush float32 subnormals. The sink takes part in m and in the
sums over P. Scores of 10^7 and more have e_ij beyond 1. Then any key near the largest may turn out to be it:
X has the exponential itself, of which P (e + E) is the first term, and a probability is wrong by 1 at most.
Where a kernel leaves keys out (`plan.decay`), X_ij is at least P_ij of those with P_ij <= share / N, and E_i
has -log(1 - their sum) besides.

Rows are of three kinds. Rows in which a score may overflow float32, or has no bound, are open. Rows whose lse
is NaN or infinite (NaN or +inf among the scores, no key at all) have exactly known outputs and a bound of 0.
All others have a bound; where it turns out to be none, the element is open, never exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from attnc.expr.nodes import Expr
from attnc.model.attention import EPSILON, Attention, Form
from attnc.model.dtypes import DType
from attnc.plan.ir import ErrorBound
from attnc.reference import (
    WEIGHTS,
    Array,
    Bools,
    Floats,
    Head,
    Input,
    bf16_to_f32,
    compute_unscaled,
    empty_outputs,
    f32_to_bf16,
    finish,
    heads,
    to_arrays,
    weigh,
)
from attnc.verify.running_error import FLUSHED, HUGE, Approx, RunningError, U, exponential_error
from attnc.verify.stick_errors import StickErrors, sum_error

# --- the bound ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one output should be.

    value: the reference; allowed: the bound on |output - value|; open: where the language leaves the
    element open (a masked key has an infinite value, a score leaves float32); overflow: where +-inf stands
    for a value beyond the largest finite one; eager: what an unfused evaluation in the input's type gives,
    as a yardstick.
    """

    value: Floats
    allowed: Floats
    open: Bools
    overflow: Bools
    eager: Floats


def to_float64(values: Input) -> Floats:
    """Returns an output, on any device and of any type, as float64."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


#: Slack for the second-order terms that the analysis drops.
SLACK = 1.05
#: exp of this leaves float32.
LARGEST_EXPONENT = 128 * np.log(2)


def expect(attention: Attention, tensors: Mapping[str, Input], bound: ErrorBound) -> dict[str, Expected]:
    """Returns the reference and bound of every output, in the declared layouts. Tensors as for
    `reference`.
    """
    arrays = to_arrays(attention, tensors)
    parts = {f.name: empty_outputs(attention, arrays) for f in fields(Expected)}
    for kind in parts.keys() - {"value"}:
        for array in parts[kind].values():
            array[...] = 0
    for head in heads(attention, arrays):
        for name, expected in expected_rows(head, bound).items():
            for kind in parts:
                if name in parts[kind]:
                    head.place(attention.tensor(name), parts[kind])[...] = getattr(expected, kind)
    return {
        t.name: Expected(
            value=parts["value"][t.name],
            allowed=parts["allowed"][t.name],
            open=parts["open"][t.name].astype(np.bool_),
            overflow=parts["overflow"][t.name].astype(np.bool_),
            eager=parts["eager"][t.name],
        )
        for t in attention.outputs
    }


def expected_rows(head: Head, bound: ErrorBound) -> dict[str, Expected]:
    """Returns the rows of one head: o [M, Dv], the attention before an epilogue, rounded as o is, and lse
    [M, 1].
    """
    form = head.attention.softmax.form
    if form in _ROWS_OF:
        return _ROWS_OF[form](head, bound)
    o, lse = compute_unscaled(head)
    with np.errstate(all="ignore"):
        size, dot = dot_products(head, bound)
        score = RunningError.of(head, dot, bound).analyse(head.attention.score)
        visible = head.visible
        s = np.where(visible, score.value.astype(np.float64), -np.inf)
        seen = ~np.isneginf(s)
        too_large = visible & (
            score.overflows | np.isinf(score.error) | ((size > HUGE) & np.isfinite(dot.value))
        )

        sink = head.sink
        m_keys = s.max(axis=1, initial=-np.inf, keepdims=True)
        m = np.fmax(m_keys, sink)
        m_size = np.fmax(_finite(np.abs(m)), _finite(np.abs(m_keys)))
        shift = m_size + bound.largest_shift
        e = np.where(seen, score.error + U * (2 * (m - s) + 2 * shift + 2 * bound.exp_ulps), 0.0)
        e_sink = _finite(U * (2 * (m - sink) + 2 * shift + 2 * bound.exp_ulps))
        p = np.where(seen, np.exp(s - lse[:, None]), 0.0)
        p_sink = _finite(np.exp(sink - lse[:, None]))
        exponent, at_sink = s - lse[:, None], sink - lse[:, None]
        mean_e = _log_sum_exp(np.append(exponent + e, at_sink + e_sink, axis=1))
        forgotten = negligible(p, bound)
        mean_e = mean_e - np.log1p(-forgotten.sum(axis=1, keepdims=True))
        exponents = np.maximum(exponential_error(p, exponent, e + mean_e).clip(max=1.0), forgotten)
        tiles = -(-head.shape[1] // bound.min_tile_kv)
        sums = 2 * U * (bound.tile_kv + tiles + 2 * bound.splits + bound.joining_error(head.shape[1]) + 8) + (
            4 * U * tiles if bound.renormalised else 0
        )
        # where the maximum is rounded, and the product it is subtracted from is not, exp2 leaves float32
        too_large = too_large | (visible & (U * shift >= LARGEST_EXPONENT))
        row_open: Bools = np.asarray(np.broadcast_to(too_large, head.shape).any(axis=1, keepdims=True))
        row_open = row_open | np.isnan(sink) | np.isposinf(sink)
        judged = ~row_open & np.isfinite(lse[:, None])
        lse_allowed = _bound_values(
            mean_e + sums + 2 * U * (np.abs(lse[:, None]) + shift) + bound.tail, judged
        )
        p_max = np.fmax(p.max(axis=1, initial=0.0, keepdims=True), p_sink)
        cut_off = (chain_error(bound, seen) - U * bound.tile_kv).clip(0)
        softmax = head.attention.softmax
        of_keys = softmax.v_scale if softmax.scales_keys else None
        scales = None if of_keys is None else _key_scales(head, dot, bound, of_keys)
        weights = _Weights(head, bound, p, exponents, sums + cut_off[:, None], p_max, seen, judged, scales)
        factor = softmax.of_rows
        found = Approx(head.v_scale, np.zeros(())) if factor is None else _scale(head, dot, bound, factor)
        attended = weights.attend(o, found, row_open)
        eager = _eager(head, DType(bound.input_dtype))
        return {
            "o": _leave(head, bound, _finish(head, bound, attended), eager),
            "attention": _leave(head, bound, attended, eager),
            "lse": Expected(
                value=lse[:, None],
                allowed=SLACK * lse_allowed,
                open=row_open | np.isinf(lse_allowed),
                overflow=np.zeros_like(row_open),
                eager=lse[:, None],
            ),
        }


def _picked_rows(head: Head, bound: ErrorBound) -> dict[str, Expected]:
    """Returns `expected_rows` of softpick, with P_ij = exp(s_ij - L_i), of which sums may be above 1.

        A_ij = P_ij e_ij + exp(-L_i) e_i + u (P_ij + exp(-L_i))     of the difference P_ij - exp(-L_i)
        G_i  = sum_j A_ij + EPSILON exp(-L_i) e_i                   of the denominator
        |Y' - Y|_ij <= (A_ij + Y_ij G_i) / (1 - G_i)                for Y = max(P - exp(-L), 0), and 1 at most

    e_i: the error of exp(-m), for a maximum m of 0 or more.
    """
    o, lse = compute_unscaled(head)
    with np.errstate(all="ignore"):
        size, dot = dot_products(head, bound)
        score = RunningError.of(head, dot, bound).analyse(head.attention.score)
        visible = head.visible
        s = np.where(visible, score.value.astype(np.float64), 0.0)
        too_large = visible & (
            score.overflows | np.isinf(score.error) | ((size > HUGE) & np.isfinite(dot.value))
        )
        m = _finite(s.max(axis=1, initial=0.0, keepdims=True))
        too_large = too_large | (visible & (U * m >= LARGEST_EXPONENT))
        row_open: Bools = np.asarray(np.broadcast_to(too_large, head.shape).any(axis=1, keepdims=True))
        row = lse[:, None]
        error = np.where(np.isneginf(s), 0.0, score.error + U * (2 * (m - s) + 2 * m + 2 * bound.exp_ulps))
        error_of_one = U * (4 * m + 2 * bound.exp_ulps)
        p, one = np.exp(s - row), np.exp(-row)
        a = exponential_error(p, s - row, error) + one * error_of_one + U * (p + one)
        a = np.where(visible, a, 0.0)
        grows = a.sum(axis=1, keepdims=True) + EPSILON * one * error_of_one
        left = np.where(grows < 0.9, 1 - grows, np.nan)
        y = np.where(visible, (p - one).clip(0), 0.0)
        exponents = np.where(grows < 0.9, (a + y * grows) / left, 1.0).clip(max=1.0)
        exponents = np.where(visible, exponents, 0.0)
        tiles = -(-head.shape[1] // bound.min_tile_kv)
        sums = 2 * U * (bound.tile_kv + tiles + 2 * bound.splits + 8)
        judged = ~row_open & np.isfinite(row)
        of_lse = np.where(grows < 0.9, -np.log1p(-grows), np.inf)
        lse_allowed = _bound_values(of_lse + sums + 2 * U * (np.abs(row) + m), judged)
        cut_off = (chain_error(bound, visible) - U * bound.tile_kv).clip(0)
        p_max = np.exp(m - row)
        weights = _Weights(head, bound, y, exponents, sums + cut_off[:, None], p_max, visible, judged)
        attended = weights.attend(o, Approx(head.v_scale, np.zeros(())), row_open)
        eager = _eager(head, DType(bound.input_dtype))
        return {
            "o": _leave(head, bound, _finish(head, bound, attended), eager),
            "attention": _leave(head, bound, attended, eager),
            "lse": Expected(
                value=row,
                allowed=SLACK * lse_allowed,
                open=row_open | np.isinf(lse_allowed),
                overflow=np.zeros_like(row_open),
                eager=row,
            ),
        }


def negligible(p: Floats, bound: ErrorBound) -> Floats:
    """Returns the probabilities [M, N] of keys that a kernel may leave out (`plan.decay`), 0 for others."""
    least = bound.left_out / max(p.shape[1], 1)
    return np.where(p <= least, p, 0.0)


def _broken_rows(head: Head, bound: ErrorBound) -> dict[str, Expected]:
    """Returns `expected_rows` of stick-breaking: see `stick_errors`. Nothing is promised of a row with a
    visible score that is NaN or infinite.
    """
    o, lse = compute_unscaled(head)
    with np.errstate(all="ignore"):
        size, dot = dot_products(head, bound)
        score = RunningError.of(head, dot, bound).analyse(head.attention.score)
        row_open = leaves_sticks_open(head, score, size, dot)
        tiles = -(-head.shape[1] // bound.min_tile_kv)
        many = sum_error(bound, tiles)
        exponentials = int((tiles + bound.splits) * (bound.exp_ulps + 1))
        sticks = StickErrors.of(score, head.visible, bound, many, exponentials)
        sums = 2 * U * (bound.tile_kv + tiles + 2 * bound.splits + 8)
        cut_off = (chain_error(bound, sticks.seen) - U * bound.tile_kv).clip(0)
        judged = ~row_open
        p_max = np.ones_like(lse)[:, None]
        weights = _Weights(
            head, bound, sticks.p, sticks.p_error, sums + cut_off[:, None], p_max, sticks.seen, judged
        )
        attended = weights.attend(o, Approx(head.v_scale, np.zeros(())), row_open)
        eager = _eager(head, DType(bound.input_dtype))
        lse_allowed = sticks.left_error.sum(axis=1, keepdims=True) + 4 * U * np.abs(lse[:, None])
        return {
            "o": _leave(head, bound, _finish(head, bound, attended), eager),
            "attention": _leave(head, bound, attended, eager),
            "lse": Expected(
                value=lse[:, None],
                allowed=SLACK * _bound_values(lse_allowed, judged) + FLUSHED,
                open=row_open | ~np.isfinite(lse_allowed),
                overflow=np.zeros_like(row_open),
                eager=lse[:, None],
            ),
        }


def leaves_sticks_open(head: Head, score: Approx, size: Floats, dot: Approx) -> Bools:
    """Returns the rows [M, 1] of stick-breaking of which nothing is promised, from scores and products."""
    s = np.where(head.visible, score.value.astype(np.float64), -np.inf)
    unknown = ~np.isfinite(s) & ~np.isneginf(s)
    too_large = head.visible & (
        score.overflows | np.isinf(score.error) | unknown | ((size > HUGE) & np.isfinite(dot.value))
    )
    found: Bools = np.asarray(np.broadcast_to(too_large, head.shape).any(axis=1, keepdims=True))
    return found


def _weighed_rows(head: Head, bound: ErrorBound) -> dict[str, Expected]:
    """Returns `expected_rows` where nothing is normalised.

    |o - r| <= sum_j (e_ij + |w_ij| (sums + u_p)) |v_j|, with e of the running error of the weights w, which
    are rounded to P's type. Nothing is promised of a row with a weight that leaves that type or float32.
    Weights may be larger than 1, and so may what is lost where a subnormal value is flushed.
    """
    with np.errstate(all="ignore"):
        size, dot = dot_products(head, bound)
        found = RunningError.of(head, dot, bound).analyse(head.attention.score)
        w, visible, p_dtype = np.abs(head.weights), head.visible, DType(bound.p_dtype)
        error = np.where(visible, np.broadcast_to(found.error, head.shape), 0.0)
        leaves = ~np.isfinite(w) | (w + error > p_dtype.largest * (1 - p_dtype.unit_roundoff))
        leaves = leaves | found.overflows | ~np.isfinite(error) | ((size > HUGE) & np.isfinite(dot.value))
        row_open: Bools = np.asarray((visible & leaves).any(axis=1, keepdims=True))
        w, error = (np.where(visible & ~row_open, x, 0.0) for x in (w, error))
        tiles = -(-head.shape[1] // bound.min_tile_kv)
        sums = 2 * U * (bound.tile_kv + tiles + 2 * bound.splits + 8)
        cut_off = (chain_error(bound, visible) - U * bound.tile_kv).clip(0)[:, None]
        share = error + (w + error) * (sums + cut_off + p_dtype.unit_roundoff + bound.product_error)
        v_size = np.abs(np.where(np.isfinite(head.v), head.v, 0.0))
        lost = max(p_dtype.smallest_subnormal / 2, FLUSHED) * (visible & ~row_open)
        o = weigh(head)
        b = (share + lost) @ v_size + 4 * U * np.where(np.isfinite(o), np.abs(o), 0.0)
        special = ~np.isfinite(head.v)
        tiny = ~visible | (w <= error + 4 * lost)  # 0 * inf decides
        unsure = np.asarray(tiny.astype(np.float64) @ special > 0) | (w @ v_size + b > DType.F32.largest)
        flushed = (w + error) @ np.minimum(v_size, FLUSHED)
        rows = _RawRows(o, b, flushed, row_open | unsure)
        eager = _eager(head, DType(bound.input_dtype))
    return {
        "o": _leave(head, bound, _finish(head, bound, rows), eager),
        "attention": _leave(head, bound, rows, eager),
    }


#: What is expected of rows of other forms than softmax.
_ROWS_OF: Mapping[Form, Callable[[Head, ErrorBound], dict[str, Expected]]] = {
    "softpick": _picked_rows,
    "stick_breaking": _broken_rows,
    "none": _weighed_rows,
}


def _scale(head: Head, dot: Approx, bound: ErrorBound, factor: Expr) -> Approx:
    found = replace(RunningError.of(head, dot, bound), columns=0).analyse(factor)
    return Approx(head.v_scale, found.error + U * np.abs(head.v_scale) + FLUSHED, found.overflows)


def _key_scales(head: Head, dot: Approx, bound: ErrorBound, factor: Expr) -> Approx:
    """Returns the scale of v of each key, [M, N], with what multiplying p by it adds to its error; it
    overflows where the product may leave the type of p.
    """
    found = replace(RunningError.of(head, dot, bound), columns=0).analyse(factor)
    value, error = np.broadcast_to(head.key_scale, head.shape), np.broadcast_to(found.error, head.shape)
    p_dtype = DType(bound.p_dtype)
    most = p_dtype.largest * (1 - p_dtype.unit_roundoff) / bound.most_probability
    leaves = ~(np.abs(value) + error < most) | np.broadcast_to(found.overflows, head.shape)
    return Approx(value, error + U * np.abs(value) + FLUSHED, leaves)


def _log_sum_exp(exponents: Floats) -> Floats:
    largest = exponents.max(axis=1, keepdims=True)
    total = np.exp(exponents - largest).sum(axis=1, keepdims=True)
    return np.asarray(_finite(largest + np.log(total)).clip(0))


def chain_error(bound: ErrorBound, products: Bools) -> Floats:
    """Returns [M]: what tensor cores cut off from sums along the last axis of those products [M, N] that are
    not 0, relative to the sums of magnitudes; 0 where no sum is longer than a tile (`plan.error_bound`).
    """
    if not bound.chained or not products.shape[1]:
        return np.zeros(len(products))
    count = products.sum(axis=1)
    spanned = products.shape[1] - products.argmax(axis=1) - products[:, ::-1].argmax(axis=1)
    return np.asarray(bound.addition_error * np.minimum(2 * count, spanned + 4))


def dot_products(head: Head, bound: ErrorBound) -> tuple[Floats, Approx]:
    """Returns |Q||K|^T and Q K^T, [M, N]: factors and products below the normal numbers may be lost.

    Nothing is promised of a finite product whose partial sums may leave float32; one that is infinite or NaN
    is so in float32 too.
    """
    q, k = np.abs(head.q), np.abs(head.k)
    size = q @ k.T
    lost = FLUSHED * (q.shape[1] + q.sum(axis=1, keepdims=True) + k.sum(axis=1))
    error = bound.dot_error(q.shape[1]) * size + np.where(size > 0, lost, 0.0)
    dot = head.q @ head.k.T
    error = np.where(np.isfinite(dot), np.where(size > HUGE, np.inf, error), 0.0)
    if head.tiny is not None:  # of such a key nothing is promised
        error = np.where(head.tiny, np.inf, error)
    return size, Approx(dot, error)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The probabilities of one head's rows, [M, N], and their errors before rounding to P's type: those of
    their exponents, and the relative ones of sums, [M, 1]. scales: of v, for each key.
    """

    head: Head
    bound: ErrorBound
    p: Floats
    exponents: Floats
    sums: Floats
    p_max: Floats
    seen: Bools
    judged: Bools
    scales: Approx | None = None

    def attend(self, o: Floats, factor: Approx, row_open: Bools) -> _RawRows:
        bound, v = self.bound, self.head.v
        p_dtype = DType(bound.p_dtype)
        u_p = p_dtype.unit_roundoff
        u_v = bound.product_error
        drop, kept = self.head.dropout
        w = _bound_values(self.exponents + self.p * (self.sums + u_p + u_v), self.judged)
        scale = 1 / (1 - drop) if drop < 1 else 0.0  # every key is dropped
        w = np.where(kept, w * scale, 0.0)
        v_size = np.abs(np.where(np.isfinite(v), v, 0.0))
        largest_scale: Floats | float = 1.0
        if self.scales is not None:
            unsure = self.seen & (self.scales.overflows | ~np.isfinite(self.scales.error))
            row_open = row_open | unsure.any(axis=1, keepdims=True)
            sizes, errors = (
                np.where(self.seen & ~unsure, x, 0.0) for x in (np.abs(self.scales.value), self.scales.error)
            )
            w = w * sizes + np.where(kept, (self.p * scale + w) * errors, 0.0)
            largest_scale = sizes.max(axis=1, initial=0.0, keepdims=True)
        delta_p = max(p_dtype.smallest_subnormal / 2, FLUSHED) * scale
        lost = (
            delta_p / bound.least_probability * _bound_values(self.p_max, self.judged) * (self.seen @ v_size)
        )
        size = np.where(np.isfinite(o), np.abs(o), 0.0)
        b = w @ v_size + lost
        if bound.tail:
            largest = np.where(self.seen[:, :, None], v_size, 0.0).max(axis=1, initial=0.0)
            b = b + bound.tail * (largest * largest_scale + size) * scale
        may_overflow = np.asarray(factor.overflows | (size + b > DType.F32.largest)) & (factor.error > 0)
        b = factor.size * b + factor.error * (size + b)
        flushed = np.where(factor.error > 0, FLUSHED * factor.size, 0.0)
        return _RawRows(o * factor.value, b, flushed, row_open | self._open(v) | may_overflow)

    def _open(self, v: Floats) -> Bools:
        """Marks where 0 * inf decides: infinite values of masked keys, or whose weight may underflow."""
        special = ~np.isfinite(v)
        if not special.any():
            return np.zeros((len(self.p), v.shape[1]), dtype=np.bool_)
        tiny = 4 * max(DType(self.bound.p_dtype).smallest_subnormal, FLUSHED) / self.bound.least_probability
        vanishes = self.exponents if self.head.attention.softmax.form == "softpick" else 0.0
        doubtful = ~self.seen | (self.p <= tiny * self.p_max + vanishes)
        return np.asarray(doubtful.astype(np.float64) @ special > 0)


@dataclass(frozen=True, slots=True)
class _RawRows:
    """Rows of o before they are rounded, [M, Dv]: values, bounds on their errors, what may be flushed to 0
    besides, and where the language leaves them open.
    """

    value: Floats
    error: Floats
    flushed: Floats
    open: Bools


def _finish(head: Head, bound: ErrorBound, attended: _RawRows) -> _RawRows:
    epilogue = head.attention.epilogue
    if epilogue is None:
        return attended
    error = SLACK * attended.error + 2 * (attended.flushed + FLUSHED)
    unsure = attended.open | np.isnan(error)
    overflows = np.abs(attended.value) + error > DType.F32.largest
    given = Approx(attended.value, np.where(unsure, np.inf, error), overflows & np.isfinite(attended.value))
    found = replace(RunningError.of(head, given, bound), columns=0).analyse(epilogue)
    shape = attended.value.shape
    return _RawRows(
        value=np.broadcast_to(found.value, shape).astype(np.float64),
        error=np.broadcast_to(found.error, shape) + FLUSHED,
        flushed=np.zeros(()),
        open=attended.open | np.broadcast_to(np.isinf(found.error) | found.overflows, shape),
    )


def _leave(head: Head, bound: ErrorBound, rows: _RawRows, eager: Floats) -> Expected:
    o, dtype = rows.value, DType(bound.o_dtype)
    b = rows.error + dtype.unit_roundoff * np.where(np.isfinite(o), np.abs(o), 0.0)
    b = np.where(np.isnan(b), np.inf, b)
    return Expected(
        value=o,
        allowed=SLACK * b + 2 * (max(dtype.smallest_subnormal / 2, FLUSHED) + rows.flushed),
        open=rows.open | np.isinf(b),
        overflow=np.abs(o) + b > dtype.largest * (1 - dtype.unit_roundoff),
        eager=eager,
    )


def _eager(head: Head, dtype: DType) -> Floats:
    """Returns o as an unfused evaluation gives it that rounds every intermediate result to the input's
    type.
    """
    dot = round_to(dtype, head.q @ head.k.T)
    score = round_to(dtype, np.broadcast_to(head.value(head.attention.score, dot), head.shape))
    if head.attention.softmax.form == "none":
        o = round_to(dtype, np.where(head.visible, score, 0.0) @ head.v)
        return o if head.attention.epilogue is None else round_to(dtype, finish(head, o))
    form = head.attention.softmax.form
    if form in WEIGHTS:
        p, _ = WEIGHTS[form](score.astype(np.float64), head.visible)
        attended = round_to(dtype, round_to(dtype, p) @ head.v)
        return attended if head.attention.epilogue is None else round_to(dtype, finish(head, attended))
    s = np.where(head.visible, score.astype(np.float64), -np.inf)
    sink = head.sink
    m = np.fmax(s.max(axis=1, initial=-np.inf, keepdims=True), sink)
    weights = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    total = weights.sum(axis=1, keepdims=True) + np.exp(sink - m)
    drop, kept = head.dropout
    shares = weights / np.where(total == 0, 1.0, total) / (1 - drop)
    scales = np.where(np.isneginf(s), 0.0, head.key_scale)
    p = round_to(dtype, np.where(kept, shares, 0.0) * scales)
    attended = round_to(dtype, (p @ head.v) * head.v_scale)
    return attended if head.attention.epilogue is None else round_to(dtype, finish(head, attended))


def round_to(dtype: DType, values: Array) -> Floats:
    """Returns the values rounded to nearest even in this type, as float64."""
    if dtype is DType.BF16:
        return bf16_to_f32(f32_to_bf16(values.astype(np.float32))).astype(np.float64)
    return values.astype(np.float16 if dtype is DType.F16 else np.float32).astype(np.float64)


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _bound_values(values: Floats, judged: Bools) -> Floats:
    return np.where(judged, np.where(np.isnan(values), np.inf, values), 0.0)
