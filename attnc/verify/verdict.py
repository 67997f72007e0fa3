"""Whether outputs are right: each element against the bound of `tolerance`, NaN and infinities exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Role, Tensor
from attnc.reference import Bools, Floats, Input
from attnc.verify.running_error import FLUSHED
from attnc.verify.tolerance import Expected, to_float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether outputs are right.

    worst: the largest error / bound, and where; ratios: the same per output; eager_ratio: largest error of o
    relative to that of an eager evaluation, which is the yardstick of flash-attention's tests; open: elements
    of which nothing is promised, and so nothing was asked; rule: what is broken besides the bound (`Kept`);
    is_left_out: the case takes more memory than there is, and says nothing.
    """

    ok: bool
    message: str
    worst: float = 0.0
    where: str = ""
    eager_ratio: float = 0.0
    open: int = 0
    ratios: Mapping[str, float] = field(default_factory=dict)
    rule: str = ""
    is_left_out: bool = False


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
    return Verdict(
        ok=not failures,
        message="; ".join(failures) or "within the bound",
        worst=ratios[worst],
        where=wheres[worst],
        eager_ratio=_eager_ratio(expected["o"], to_float64(outputs["o"]), u_o),
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


def apart(wants: tuple[Expected, Expected], left: Floats, right: Floats) -> Bools:
    """Marks elements in which two right runs cannot differ so: by more than both bounds, or in what is NaN or
    infinite. wants: of either run.
    """
    a, b = wants
    with np.errstate(invalid="ignore"):
        near = np.abs(left - right) <= a.allowed + b.allowed
        sign = np.sign(np.where(np.isinf(left), left, right))
        overflown = a.overflow & b.overflow & (np.isinf(left) | np.isinf(right)) & (np.sign(a.value) == sign)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    return np.asarray(~(near | same | a.open | b.open | overflown))


def _eager_ratio(want: Expected, got: Floats, u_o: float) -> float:
    judged = np.isfinite(want.value) & np.isfinite(got) & np.isfinite(want.eager) & ~want.open
    if not judged.any():
        return 0.0
    error = np.abs(got[judged] - want.value[judged]).max()
    eager = np.abs(want.eager[judged] - want.value[judged]).max()
    size = np.abs(want.value[judged]).max()
    return float(error / max(eager, u_o * size, FLUSHED))


def _where(tensor: Tensor, at: tuple[np.intp, ...]) -> str:
    names = {Role.BATCH: "b", Role.HEAD: "h", Role.QUERY: "q_idx", Role.KEY: "kv_idx", Role.FEATURE: "d"}
    axes = zip(tensor.roles, at, strict=False)
    return f"{tensor.name}[{', '.join(f'{names[role]}={int(index)}' for role, index in axes)}]"
