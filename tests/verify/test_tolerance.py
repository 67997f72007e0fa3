"""The bound accepts an honest tiled kernel on every style of input, and rejects kernels with a bug.

The kernel is emulated in NumPy: float32 throughout, P rounded to the input's type, as in generated kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from attnc.expr.nodes import Binary, Call, Const, Dot, Expr, Neg
from attnc.model.attention import Attention, Softmax
from attnc.model.dtypes import DType
from attnc.reference import Head, empty_outputs, heads, to_arrays
from attnc.verify.data import LOGITS, SPECIALS, VALUES, DenseSizes, draw_qkv, generator
from attnc.verify.tolerance import expect, round_to
from attnc.verify.verdict import Verdict, judge
from tests.by_day import some_by_day
from tests.specimens import CAUSAL, SOFTCAP, alibi, attention, dropping, error_bound, per_head, sinking

F32 = np.float32
LOG2E = F32(1.4426950408889634)


@dataclass(frozen=True)
class Tiled:
    """An emulated kernel; each field is a way to get it wrong."""

    tile: int = 16
    p_dtype: DType | None = None
    shift_mask: int = 0
    sentinel: float = -np.inf
    scale: float = 1.0
    skip_last_tile: bool = False
    forget_rescale_acc: bool = False
    forget_rescale_l: bool = False
    subtract_maximum: bool = True
    acc_dtype: DType = DType.F32
    base_two_lse: bool = False
    guard_empty_rows: bool = True
    next_head: bool = False
    drop_rescale: bool = True
    forget_sink: bool = False

    def run(self, spec: Attention, tensors: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
        arrays = to_arrays(spec, tensors)
        outputs = empty_outputs(spec, arrays)
        with np.errstate(all="ignore"):
            for head in heads(spec, arrays):
                o, lse = self.rows(head, self.p_dtype or dtype)
                head.place(spec.o, outputs)[...] = round_to(dtype, o)
                head.place(spec.tensor("lse"), outputs)[..., 0] = lse
        return outputs

    def rows(self, head: Head, p_dtype: DType) -> tuple[Any, Any]:
        if self.next_head:
            head = replace(head, k=np.roll(head.k, 1, axis=0))
        dot = (head.q.astype(F32) @ head.k.T.astype(F32)).astype(np.float64)
        score = np.broadcast_to(head.value(head.attention.score, dot), head.shape).astype(F32) * F32(
            self.scale
        )
        visible = head.visible
        if self.shift_mask:
            visible = np.roll(visible, self.shift_mask, axis=1)
        s = np.where(visible, score * LOG2E, F32(self.sentinel))
        m = np.full((len(s), 1), -np.inf, F32)
        total, acc = np.zeros_like(m), np.zeros((len(s), head.v.shape[1]), F32)
        sink = F32(-np.inf if self.forget_sink else head.sink) * LOG2E
        if np.isfinite(sink):
            m, total = np.full_like(m, sink), np.ones_like(m)
        drop, kept = head.dropout
        tiles = range(0, head.shape[1], self.tile)
        for n in tiles[:-1] if self.skip_last_tile else tiles:
            at = slice(n, n + self.tile)
            m_new = np.fmax(m, np.fmax.reduce(s[:, at], axis=1, keepdims=True))
            if not self.subtract_maximum:
                m_new = np.zeros_like(m)
            safe = np.where(np.isneginf(m_new), F32(0), m_new) if self.guard_empty_rows else m_new
            alpha, p = np.exp2(m - safe), np.exp2(s[:, at] - safe)
            total = total * (1 if self.forget_rescale_l else alpha) + p.sum(axis=1, keepdims=True, dtype=F32)
            p = np.where(kept[:, at], p * (F32(1 / (1 - drop)) if self.drop_rescale else F32(1)), F32(0))
            p = round_to(p_dtype, p).astype(F32)
            acc = acc * (1 if self.forget_rescale_acc else alpha) + p @ head.v[at].astype(F32)
            acc = round_to(self.acc_dtype, acc).astype(F32)
            m = m_new
        empty = total == 0
        o = acc / np.where(empty & self.guard_empty_rows, F32(1), total)
        lse = m if self.base_two_lse else m / LOG2E
        return o, (lse + (np.log2(total) if self.base_two_lse else np.log(total)))[:, 0]


SPECS: Mapping[str, Callable[[DType], Attention]] = {
    "causal": lambda dtype: attention(mask=CAUSAL, dtype=dtype),
    "softcap": lambda dtype: attention(score=SOFTCAP, dtype=dtype),
    "alibi": alibi,
    "sink": sinking,
    "dropout": dropping,
}
SIZES = (
    DenseSizes(B=1, M=17, N=33, H=4, Hkv=2, D=16, Dv=16),
    DenseSizes(B=2, M=40, N=29, H=2, Hkv=2, D=64, Dv=32),
    DenseSizes(B=1, M=5, N=130, H=1, Hkv=1, D=24, Dv=8),
    DenseSizes(B=1, M=3, N=0, H=1, Hkv=1, D=16, Dv=8),
)


def problem(spec: Attention, dtype: DType, at: DenseSizes, seed: int, **styles: str) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: round_to(dtype, array) for name, array in draw_qkv(at, dtype=dtype, seed=seed, **styles).items()
    }
    rng = generator(seed, 2)
    extras = {
        "slope": np.exp2(-np.arange(1.0, at.H + 1)),
        "sink": rng.normal(0, 4, at.H),
        "p": 0.3,
        "seed": seed,
    }
    return tensors | {t.name: extras[t.name] for t in spec.extras}


def verdict(
    kernel: Tiled, spec: Attention, dtype: DType, at: DenseSizes, seed: int, **styles: str
) -> Verdict:
    tensors = problem(spec, dtype, at, seed, **styles)
    expected = expect(spec, tensors, error_bound(dtype, at.D, kernel.tile))
    return judge(spec, expected, kernel.run(spec, tensors, dtype))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "dtype"), some_by_day(SPECS, [DType.BF16, DType.F16, DType.F32], of=6))
def test_no_false_alarm(name: str, dtype: DType) -> None:
    spec = SPECS[name](dtype)
    values, specials, sizes = itertools.cycle(VALUES), itertools.cycle(SPECIALS), itertools.cycle(SIZES)
    worst = 0.0
    for seed, logits in enumerate([*LOGITS] * 3):
        styles = {"logits": logits, "values": next(values), "special": next(specials) if seed % 2 else "none"}
        result = verdict(Tiled(tile=(16, 32, 128)[seed % 3]), spec, dtype, next(sizes), seed, **styles)
        assert result.ok, f"{styles}, seed {seed}: {result.message}"
        worst = max(worst, result.worst)
    assert worst > 0.05, "a bound that nothing comes near accepts anything"


BUGS: Mapping[str, tuple[str, Tiled]] = {
    "mask one key too far": ("causal", Tiled(shift_mask=1)),
    "finite sentinel": ("causal", Tiled(sentinel=-5e4)),
    "scale of a padded head dim": ("causal", Tiled(scale=0.9)),
    "last tile skipped": ("causal", Tiled(skip_last_tile=True)),
    "accumulator not rescaled": ("causal", Tiled(forget_rescale_acc=True)),
    "sum not rescaled": ("causal", Tiled(forget_rescale_l=True)),
    "maximum not subtracted": ("causal", Tiled(subtract_maximum=False)),
    "base-2 lse": ("causal", Tiled(base_two_lse=True)),
    "empty rows are NaN": ("causal", Tiled(guard_empty_rows=False)),
    "keys of the next row": ("causal", Tiled(next_head=True)),
    "dropout not scaled": ("dropout", Tiled(drop_rescale=False)),
    "sink forgotten": ("sink", Tiled(forget_sink=True)),
    "accumulates in f16": ("causal", Tiled(acc_dtype=DType.F16)),
    "P in bf16": ("causal", Tiled(p_dtype=DType.BF16)),
}
#: In bfloat16 a coarser accumulator or P is within its own rounding error.
INVISIBLE = {(DType.BF16, "accumulates in f16"), (DType.BF16, "P in bf16")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_rejected(bug: str, dtype: DType) -> None:
    if (dtype, bug) in INVISIBLE:
        return
    name, kernel = BUGS[bug]
    spec = SPECS[name](dtype)
    sizes = itertools.cycle(SIZES[:3])
    for seed, (logits, values) in enumerate(itertools.product(LOGITS, ("random", "one_hot", "ones"))):
        if not verdict(kernel, spec, dtype, next(sizes), seed, logits=logits, values=values).ok:
            return
    pytest.fail("accepted on every input")


def test_message_names_the_element() -> None:
    spec = attention(dtype=DType.F32)
    tensors = problem(spec, DType.F32, SIZES[0], 1)
    expected = expect(spec, tensors, error_bound(DType.F32, 16, 16))
    outputs = {name: want.value.copy() for name, want in expected.items()}
    assert judge(spec, expected, outputs).message == "within the bound"
    outputs["o"][0, 3, 2, 5] += 0.5
    outputs["lse"][0, 1, 7] = np.nan
    result = judge(spec, expected, outputs)
    assert not result.ok
    assert result.message.startswith("o[b=0, q_idx=3, h=2, d=5] = ")
    assert "lse[b=0, h=1, q_idx=7] = nan, expected " in result.message
    assert result.where == "lse[b=0, h=1, q_idx=7]"


def test_a_key_beside_the_largest_may_be_it() -> None:
    """Two scores of 10^9 that no float32 tells apart: the mean of their values is right, 1 more is not."""
    spec = attention(Binary("*", Dot(), Const(1e9)), dtype=DType.F32)
    tensors = {name: np.zeros((1, n, 1, 8)) for name, n in (("q", 1), ("k", 2), ("v", 2))}
    tensors["q"][..., 0] = 1
    tensors["k"][0, :, 0, 0] = 1, 1 + 2.0**-22
    tensors["v"][0, 0] = 1
    expected = expect(spec, tensors, error_bound(DType.F32, 8, 16))
    assert expected["o"].value.max() < 1e-40
    outputs = {"o": np.full((1, 1, 1, 8), 0.5), "lse": expected["lse"].value}
    assert judge(spec, expected, outputs).ok
    outputs["o"] += 1
    assert not judge(spec, expected, outputs).ok


def test_nothing_is_promised_of_tiny_divisors() -> None:
    """Their reciprocals are infinite, and 0 times that is NaN."""
    slope, load = per_head("slope")
    spec = attention(Binary("/", Dot(), load), extras=(slope,), dtype=DType.F32)
    tensors = problem(spec, DType.F32, SIZES[0], 1, logits="zero_q")
    for value, is_open in ((1e-40, True), (1e-30, False)):
        tensors["slope"] = np.full(4, value)
        found = expect(spec, tensors, error_bound(DType.F32, 16, 16))
        assert (found["o"].open == is_open).all()


def logistic(numerator: Expr, one: float) -> Expr:
    return Binary("/", numerator, Binary("+", Const(one), Call("exp", (Neg(Dot()),))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("one", [1.0, 2.0])
def test_an_exponential_that_overflows_in_a_divisor_leaves_a_bound(logits: str, one: float) -> None:
    """Not 0, and not none: the row is the mean of all values where every score is 0."""
    spec = attention(logistic(Dot(), one), dtype=DType.F32)
    tensors = problem(spec, DType.F32, SIZES[0], 1, logits=logits)
    expected = expect(spec, tensors, error_bound(DType.F32, 16, 16))
    for want in expected.values():
        assert not want.open.any()
        assert ((want.allowed > 0) & (want.allowed < np.inf)).all()
    outputs = {name: want.value.copy() for name, want in expected.items()}
    assert judge(spec, expected, outputs).ok
    outputs["o"][0, 3, 2, 5] += expected["o"].allowed[0, 3, 2, 5] * 1.1
    assert not judge(spec, expected, outputs).ok


def test_scores_that_may_be_no_number_are_open_not_exact() -> None:
    """exp(s) - 2 exp(s) is inf - inf in float32 where s is beyond 88, but not in float64."""
    power = Call("exp", (Dot(),))
    spec = attention(Binary("-", power, Binary("*", power, Const(2.0))), dtype=DType.F32)
    tensors = {name: np.ones((1, 2, 1, 8)) for name in "qkv"}
    tensors["q"][0, 1] = 100
    expected = expect(spec, tensors, error_bound(DType.F32, 8, 16))
    assert [bool(row.all()) for row in expected["o"].open[0, :, 0]] == [False, True]
    outputs = {name: want.value.copy() for name, want in expected.items()}
    outputs["o"][0, 1] = np.nan
    assert judge(spec, expected, outputs).ok
    outputs["o"][0, 0] = np.nan
    assert not judge(spec, expected, outputs).ok


def test_weights_above_1_multiply_what_is_flushed() -> None:
    """Hardware may read a subnormal value as 0; nothing divides by the sum of the weights afterwards."""
    spec = attention(Dot(), softmax=Softmax(form="none"), dtype=DType.F32)
    spec = replace(spec, outputs=(spec.o,))
    tensors = {name: np.ones((1, 1, 1, 8)) for name in "qk"} | {"v": np.full((1, 1, 1, 8), 2.0**-127)}
    expected = expect(spec, tensors, error_bound(DType.F32, 8, 16))
    assert expected["o"].value.max() == 8 * 2.0**-127
    assert judge(spec, expected, {"o": np.zeros((1, 1, 1, 8))}).ok
    assert not judge(spec, expected, {"o": np.full((1, 1, 1, 8), -(2.0**-122))}).ok


def test_rows_of_an_infinite_sink_are_open() -> None:
    """inf - inf is NaN where keys are seen; kernels that visit no tile have nothing to subtract."""
    spec = sinking(DType.BF16)
    tensors = problem(spec, DType.BF16, SIZES[0], 1)
    tensors["sink"] = np.array([np.inf, np.nan, -np.inf, 1.0])
    expected = expect(spec, tensors, error_bound(DType.BF16, 16, 16))
    for head, is_open in enumerate((True, True, False, False)):
        assert expected["o"].open[:, :, head].all() == expected["o"].open[:, :, head].any() == is_open


@pytest.mark.parametrize(("size", "is_open"), [(1e9, False), (1e10, True)])
def test_a_row_is_open_where_its_maximum_is_rounded_by_more_than_float32_can_hold(
    size: float, is_open: bool
) -> None:
    """A kernel subtracts the rounded maximum from exact products: 2^(half a unit of 10^10) is infinite."""
    spec = attention(Dot(), dtype=DType.F32)
    tensors = {name: np.ones((1, 1, 1, 8)) for name in "qkv"}
    tensors["q"] *= size / 8
    expected = expect(spec, tensors, error_bound(DType.F32, 8, 16))
    assert expected["o"].open.all() == expected["o"].open.any() == is_open
    assert expected["lse"].open.all() == is_open


LONG = 1 << 18


def chain(values: Any, at_once: int) -> float:
    """Their sum as one chain of tensor core sums makes it: cut to a float in every step."""
    total = 0.0
    for products in np.add.reduceat(values, np.arange(0, len(values), at_once)):
        unit = 2.0 ** (math.frexp(total + products)[1] - 24)
        total = math.floor((total + products) / unit) * unit
    return total


def test_one_sum_over_a_long_row() -> None:
    """16 bits: beyond the rounding of P and of o, which is all that rows of ordinary length show."""
    spec = attention(dtype=DType.F16)
    bound = error_bound(DType.F16, 8, 64)
    tensors = {name: np.zeros((1, n, 1, 8)) for name, n in (("q", 1), ("k", LONG), ("v", LONG))}
    tensors["v"][...] = 1 + 3 * 2.0**-10
    lost = chain(tensors["v"][0, :, 0, 0], 4) / LONG
    found = {"o": np.full((1, 1, 1, 8), lost), "lse": np.full((1, 1, 1), math.log(LONG))}
    verdicts = [judge(spec, expect(spec, tensors, replace(bound, chained=c)), found) for c in (True, False)]
    assert [verdict.ok for verdict in verdicts] == [True, False]
