"""How far may generated gradients lie from the reference's? The forward's bound, carried through the chain
rule.

What one head adds is in `gradient_errors`. Derivatives of the score enter the bound through `expr.derive`;
the values that they are compared with do not.

The rounding of o is the largest error, and it reaches delta_i = do_i . o_i alone. Sums over many rows would
be hidden by the sum of all its sizes, but the do of `cotangents_of` are independent normal numbers that know
nothing of o's errors: sum_i c_i do_i . e_i is normal with variance sum_i c_i^2 |e_i|^2. Six of its standard
deviations bound it (one sum in 10^9 is larger), so that a gradient whose terms cancel is still known well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from attnc.model.attention import Attention
from attnc.model.tensors import DType
from attnc.plan.ir.backward import GradientBound
from attnc.reference import heads
from attnc.reference_arrays import Array, Floats, Input, to_arrays
from attnc.reference_gradients import gradients
from attnc.verify.gradient_errors import LARGEST_F16, HeadErrors, Sums
from attnc.verify.running_error import FLUSHED, U
from attnc.verify.tolerance import SLACK
from attnc.verify.verdict import Verdict, to_float64


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
    sums = Sums.zeros(bound, {name: arrays[name] for name in {"q", "k", "v", *attention.grads}})
    with np.errstate(all="ignore"):
        for head in heads(attention, arrays):
            do = head.place(attention.o, given)
            dlse = np.zeros(head.shape[0])
            if attention.lse is not None and "lse" in given:
                dlse = head.place(attention.lse, given)[:, 0]
            HeadErrors.of(head, do, dlse, bound).add_to(sums)
        errors = {name: sums.total(name) for name in attention.grads}
    values = gradients(attention, tensors, cotangents)
    return {name: _expected(attention, name, values[name], errors[name]) for name in attention.grads}


def _expected(attention: Attention, name: str, value: Floats, error: Floats) -> ExpectedGradient:
    dtype = DType(attention.tensor(name).dtype)
    smallest = max(dtype.smallest_subnormal / 2, FLUSHED)
    allowed = SLACK * (error + (dtype.unit_roundoff + 2 * U) * np.abs(value)) + 2 * smallest
    largest = LARGEST_F16 if dtype is DType.F16 else 3.38e38
    allowed = np.where(np.isfinite(allowed) & (np.abs(value) + allowed < largest), allowed, np.inf)
    return ExpectedGradient(value=value, allowed=allowed)


def judge_gradients(expected: Mapping[str, ExpectedGradient], found: Mapping[str, Input]) -> Verdict:
    """Every element of every gradient against its bound; those without one are counted."""
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
    """Random gradients of the outputs; those of lse are 0 where it is infinite."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, 1 << 20]))
    for tensor in attention.outputs:
        value = generator.standard_normal(outputs[tensor.name].shape)
        yield tensor.name, np.where(np.isfinite(outputs[tensor.name]), value, 0.0)
