"""Is an output right? What it should be, how far it may be from that, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from attnc.model.attention import Attention
from attnc.model.tensors import DType, Role, Tensor
from attnc.reference_arrays import Bools, Floats, Input
from attnc.verify.running_error import FLUSHED


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
    the yardstick of flash-attention's tests; open: elements of which nothing is promised, and so nothing was
    asked.
    """

    ok: bool
    message: str
    worst: float = 0.0
    where: str = ""
    norm_ratio: float = 0.0
    eager_ratio: float = 0.0
    open: int = 0
    ratios: Mapping[str, float] = field(default_factory=dict)


def judge(attention: Attention, expected: Mapping[str, Expected], outputs: Mapping[str, Input]) -> Verdict:
    """Compares outputs with what is expected: NaN and infinities exactly, then every element."""
    failures, ratios, wheres = [], {}, {}
    for tensor in attention.outputs:
        want, got = expected[tensor.name], to_float64(outputs[tensor.name])
        ratio = ratio_of(want, got)
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
        open=sum(int(want.open.sum()) for want in expected.values()),
        ratios=ratios,
    )


def ratio_of(want: Expected, got: Floats) -> Floats:
    """Divides the error of each element by its bound: 0 where NaN and infinities are as they should be, or
    nothing is promised.
    """
    with np.errstate(all="ignore"):
        ratio = np.abs(got - want.value) / want.allowed
    same = (got == want.value) | (np.isnan(got) & np.isnan(want.value))
    overflown = want.overflow & np.isinf(got) & (np.sign(got) == np.sign(want.value))
    return np.where(same | overflown | want.open, 0.0, np.where(np.isnan(ratio), np.inf, ratio))


def _norms(want: Expected, got: Floats, u_o: float) -> tuple[float, float]:
    """Largest error relative to the largest value, and to the eager evaluation's, at least one rounding."""
    judged = np.isfinite(want.value) & np.isfinite(got) & np.isfinite(want.eager) & ~want.open
    if not judged.any():
        return 0.0, 0.0
    error = np.abs(got[judged] - want.value[judged]).max()
    eager = np.abs(want.eager[judged] - want.value[judged]).max()
    size = np.abs(want.value[judged]).max()
    return float(error / max(size, FLUSHED)), float(error / max(eager, u_o * size, FLUSHED))


def _where(tensor: Tensor, at: tuple[np.intp, ...]) -> str:
    names = {Role.BATCH: "b", Role.HEAD: "h", Role.QUERY: "q_idx", Role.KEY: "kv_idx", Role.FEATURE: "d"}
    axes = zip(tensor.roles, at, strict=False)
    return f"{tensor.name}[{', '.join(f'{names[role]}={int(index)}' for role, index in axes)}]"


def to_float64(values: Input) -> Floats:
    """An output, on any device and of any type, as float64."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
