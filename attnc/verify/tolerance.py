"""How far may a right kernel be from the reference? The componentwise bound that the plan promises, and the
verdict.

First-order forward analysis of a tiled softmax in float32 (Blanchard, Higham, Higham, "Accurately computing
the log-sum-exp and softmax functions", arXiv 1909.03469, plus the standard bounds for dot products and
sums), for any score expression:

    e_ij = error of s_ij (see `running_error`) + u (2 (m_i - s_ij) + 2 |m_i| + 2 exp_ulps)
    W_ij = keep_ij / (1 - p) P_ij (e_ij + sum_j P_ij e_ij + 2u (tile_kv + T + 2 splits + 8) + u_p)
    B_id = sum_j W_ij |V_jd| + delta_p max_j P_ij sum_(j visible) |V_jd| + u_o |R_id|
    |O - R| <= 1.05 B + 2 delta_o, element by element
    |L' - L| <= sum_j P_ij e_ij + 2u (tile_kv + T + 2 splits + 8) + 2u (|L| + |m|)

u = 2^-24; u_p, u_o: unit roundoff of the types of P and O; T: number of KV tiles; delta: half the smallest
subnormal, at least 2^-126 because GPUs may flush float32 subnormals. The sink takes part in m and in the
sums over P.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from attnc.model.attention import Attention
from attnc.model.tensors import DType, Role, Tensor
from attnc.plan.ir import ErrorBound
from attnc.reference import (
    Array,
    Bools,
    Floats,
    Head,
    Input,
    empty_outputs,
    heads,
    softmax,
    to_arrays,
)
from attnc.verify.rounding import bf16_to_f32, f32_to_bf16
from attnc.verify.running_error import Approx, RunningError, U

#: Slack for the second-order terms that the analysis drops.
SLACK = 1.05
_FLUSHED = 2.0**-126
#: Beyond it a score may overflow float32 on the way.
_HUGE = 1e38
_LARGEST = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38, DType.F32: 3.4028234663852886e38}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether outputs are right.

    worst: the largest error / bound, and where; ratios: the same per output; norm_ratio: largest error of o
    relative to its largest value; eager_ratio: relative to the largest error of an eager evaluation, which is
    the yardstick of flash-attention's tests.
    """

    ok: bool
    message: str
    worst: float = 0.0
    where: str = ""
    norm_ratio: float = 0.0
    eager_ratio: float = 0.0
    ratios: Mapping[str, float] = field(default_factory=dict)


def expect(attention: Attention, tensors: Mapping[str, Input], bound: ErrorBound) -> dict[str, Expected]:
    """Reference and bound of every output, in the declared layouts. Tensors as for `reference`."""
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
    """The rows of one head: o [M, Dv] and lse [M, 1]."""
    o, lse = softmax(head)
    with np.errstate(all="ignore"):
        size = np.abs(head.q) @ np.abs(head.k).T
        rounding = bound.dot_error(head.q.shape[1])
        dot = Approx(head.q @ head.k.T, rounding * size)
        score = RunningError(head, dot, dict(bound.intrinsics)).analyse(head.attention.score)
        visible = head.visible
        s = np.where(visible, score.value.astype(np.float64), -np.inf)
        seen = ~np.isneginf(s)
        too_large = seen & ((np.abs(s) + score.error > _HUGE) | (size > _HUGE)) & np.isfinite(s)

        sink = head.sink
        m_keys = s.max(axis=1, initial=-np.inf, keepdims=True)
        m = np.fmax(m_keys, sink)
        m_size = np.fmax(_finite(np.abs(m)), _finite(np.abs(m_keys)))
        shift = m_size + bound.largest_shift
        e = np.where(seen, score.error + U * (2 * (m - s) + 2 * shift + 2 * bound.exp_ulps), 0.0)
        e_sink = _finite(U * (2 * (m - sink) + 2 * shift + 2 * bound.exp_ulps))
        p = np.where(seen, np.exp(s - lse[:, None]), 0.0)
        p_sink = _finite(np.exp(sink - lse[:, None]))
        mean_e = (p * e).sum(axis=1, keepdims=True) + p_sink * e_sink
        tiles = -(-head.shape[1] // bound.min_tile_kv)
        sums = 2 * U * (bound.tile_kv + tiles + 2 * bound.splits + 8) + (
            4 * U * tiles if bound.renormalised else 0
        )
        row_open = too_large.any(axis=1, keepdims=True)
        lse_allowed = mean_e + sums + 2 * U * (np.abs(lse[:, None]) + shift)
        p_max = np.fmax(p.max(axis=1, initial=0.0, keepdims=True), p_sink)
        weights = _Weights(head, bound, p, e + mean_e + sums, p_max, seen)
        return {
            "o": weights.expected(o, row_open, _eager(head, DType(bound.input_dtype))),
            "lse": Expected(
                value=lse[:, None],
                allowed=SLACK * _finite(lse_allowed),
                open=row_open,
                overflow=np.zeros_like(row_open),
                eager=lse[:, None],
            ),
        }


@dataclass(frozen=True, slots=True)
class _Weights:
    """The probabilities of one head's rows, [M, N], and their relative errors before rounding to P's type."""

    head: Head
    bound: ErrorBound
    p: Floats
    relative: Floats
    p_max: Floats
    seen: Bools

    def expected(self, o: Floats, row_open: Bools, eager: Floats) -> Expected:
        bound, v = self.bound, self.head.v
        p_dtype, o_dtype = DType(bound.p_dtype), DType(bound.o_dtype)
        u_p = p_dtype.unit_roundoff
        u_v = bound.product_error
        drop, kept = self.head.dropout
        kept_p = np.where(kept, self.p / (1 - drop), 0.0)
        w = _finite(kept_p * (self.relative + u_p + u_v))
        v_size = np.abs(np.where(np.isfinite(v), v, 0.0))
        delta_p = max(p_dtype.smallest_subnormal / 2, _FLUSHED) / (1 - drop)
        lost = delta_p / bound.least_probability * _finite(self.p_max) * (self.seen @ v_size)
        b = w @ v_size + lost + o_dtype.unit_roundoff * np.abs(o)
        return Expected(
            value=o,
            allowed=_finite(SLACK * b + 2 * max(o_dtype.smallest_subnormal / 2, _FLUSHED)),
            open=row_open | self._open(v),
            overflow=np.abs(o) + b > _LARGEST[o_dtype] * (1 - o_dtype.unit_roundoff),
            eager=eager,
        )

    def _open(self, v: Floats) -> Bools:
        """Where 0 * inf decides: infinite values of masked keys and of keys whose weight may underflow."""
        special = ~np.isfinite(v)
        if not special.any():
            return np.zeros((len(self.p), v.shape[1]), dtype=np.bool_)
        tiny = 4 * max(DType(self.bound.p_dtype).smallest_subnormal, _FLUSHED)
        doubtful = ~self.seen | (self.p <= tiny * self.p_max)
        return np.asarray(doubtful.astype(np.float64) @ special > 0)


def _eager(head: Head, dtype: DType) -> Floats:
    """o as an unfused evaluation gives it that rounds every intermediate result to the input's type."""
    dot = round_to(dtype, head.q @ head.k.T)
    score = round_to(dtype, np.broadcast_to(head.value(head.attention.score, dot), head.shape))
    s = np.where(head.visible, score.astype(np.float64), -np.inf)
    sink = head.sink
    m = np.fmax(s.max(axis=1, initial=-np.inf, keepdims=True), sink)
    weights = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    total = weights.sum(axis=1, keepdims=True) + np.exp(sink - m)
    drop, kept = head.dropout
    p = round_to(dtype, np.where(kept, weights / np.where(total == 0, 1.0, total) / (1 - drop), 0.0))
    return round_to(dtype, p @ head.v)


def round_to(dtype: DType, values: Array) -> Floats:
    """The values rounded to nearest even in this type, as float64."""
    if dtype is DType.BF16:
        return bf16_to_f32(f32_to_bf16(values.astype(np.float32))).astype(np.float64)
    return values.astype(np.float16 if dtype is DType.F16 else np.float32).astype(np.float64)


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def judge(attention: Attention, expected: Mapping[str, Expected], outputs: Mapping[str, Input]) -> Verdict:
    """Compares outputs with what is expected: NaN and infinities exactly, then every element."""
    failures, ratios, wheres = [], {}, {}
    for tensor in attention.outputs:
        want, got = expected[tensor.name], to_float64(outputs[tensor.name])
        with np.errstate(all="ignore"):
            ratio = np.abs(got - want.value) / want.allowed
        same = (got == want.value) | (np.isnan(got) & np.isnan(want.value))
        overflown = want.overflow & np.isinf(got) & (np.sign(got) == np.sign(want.value))
        ratio = np.where(same | overflown | want.open, 0.0, np.where(np.isnan(ratio), np.inf, ratio))
        at = np.unravel_index(int(ratio.argmax()), ratio.shape) if ratio.size else ()
        ratios[tensor.name] = float(ratio[at]) if ratio.size else 0.0
        wheres[tensor.name] = _where(tensor, at)
        if ratios[tensor.name] > 1:
            failures.append(
                f"{wheres[tensor.name]} = {got[at]:.9g}, expected {want.value[at]:.9g} "
                f"+- {want.allowed[at]:.3g} ({int((ratio > 1).sum())} of {ratio.size} elements are off)"
            )
    worst = max(ratios, key=lambda name: ratios[name])
    u_o = DType(attention.o.dtype).unit_roundoff
    norm, eager = _norms(expected["o"], to_float64(outputs["o"]), u_o)
    return Verdict(
        ok=not failures,
        message="; ".join(failures) or "within the bound",
        worst=ratios[worst],
        where=wheres[worst],
        norm_ratio=norm,
        eager_ratio=eager,
        ratios=ratios,
    )


def _norms(want: Expected, got: Floats, u_o: float) -> tuple[float, float]:
    """Largest error relative to the largest value, and to the eager evaluation's, at least one rounding."""
    judged = np.isfinite(want.value) & np.isfinite(got) & np.isfinite(want.eager) & ~want.open
    if not judged.any():
        return 0.0, 0.0
    error = np.abs(got[judged] - want.value[judged]).max()
    eager = np.abs(want.eager[judged] - want.value[judged]).max()
    size = np.abs(want.value[judged]).max()
    return float(error / max(size, _FLUSHED)), float(error / max(eager, u_o * size, _FLUSHED))


def _where(tensor: Tensor, at: tuple[np.intp, ...]) -> str:
    names = {Role.BATCH: "b", Role.HEAD: "h", Role.QUERY: "q_idx", Role.KEY: "kv_idx", Role.FEATURE: "d"}
    axes = zip(tensor.roles, at, strict=False)
    return f"{tensor.name}[{', '.join(f'{names[role]}={int(index)}' for role, index in axes)}]"


def to_float64(values: Input) -> Floats:
    """An output, on any device and of any type, as float64."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
