"""How far an epilogue's gradients may lie from the reference's: those of the attention and of what it loads.

A kernel of its own computes them, from o's gradient do (exact) and the attention a, which the forward has
rounded to the type of o:

    da_id = do_id f'(a_id)            rounded to the type of o, since later kernels read it
    dx    = sum of do_id (d f / d x)  in float32

f' and d f / d x have the running error of `running_error`, from the error of a.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnc.expr.derive import derive
from attnc.expr.nodes import Expr, Load
from attnc.model.dtypes import DType
from attnc.plan.ir.backward import GradientBound
from attnc.reference import Array, Floats, Head, softmax
from attnc.verify.running_error import FLUSHED, Approx, RunningError, U
from attnc.verify.tolerance import SLACK, expected_rows


@dataclass(frozen=True, slots=True)
class EpilogueErrors:
    """Of some rows of one head, [M, Dv]: the gradient of o, and that of the attention (do) with its error;
    slope: d o / d attention; given: the attention as the backward reads it.
    """

    head: Head
    bound: GradientBound
    of_o: Floats
    do: Floats
    do_error: Floats
    slope: Floats
    given: Approx

    @staticmethod
    def of(head: Head, do: Floats, bound: GradientBound) -> EpilogueErrors:
        epilogue, exact, one = head.attention.epilogue, np.zeros(do.shape), np.ones(do.shape)
        if epilogue is None:
            return EpilogueErrors(head, bound, do, do, exact, one, Approx(exact, exact))
        attended, _ = softmax(head)
        rows = expected_rows(head, bound.forward)["attention"]
        given = Approx(attended, np.where(rows.open, np.inf, rows.allowed))
        made = EpilogueErrors(head, bound, do, do, exact, one, given)
        slope = made._analyse(derive(epilogue).dot)
        value = do * slope.value
        dtype = DType(bound.forward.o_dtype)
        error = np.abs(do) * slope.error + (dtype.unit_roundoff + 2 * U) * np.abs(value)
        error = SLACK * error + max(dtype.smallest_subnormal / 2, FLUSHED) + FLUSHED
        error = np.where(np.isfinite(error) & (np.abs(value) + error < dtype.largest), error, np.inf)
        return replace(made, do=value, do_error=np.where(do == 0, 0.0, error), slope=np.abs(slope.value))

    def add_to(self, errors: Mapping[str, Floats]) -> None:
        attention = self.head.attention
        if attention.epilogue is None:
            return
        for load, value in derive(attention.epilogue).loads:
            if load.tensor in attention.grads:
                self._scatter(errors[load.tensor], load, self._term(value))

    def _term(self, value: Expr) -> Floats:
        slope = self._analyse(value)
        columns = self.of_o.shape[1]
        tiles = -(-self.head.dims["M"] // self.bound.min_tile)
        many = self.bound.tile + columns + tiles + self.head.dims["B"] * self.head.dims["H"] + 8
        size = np.abs(self.of_o)
        error = size * (slope.error + (2 * many + 3) * U * np.abs(slope.value))
        return np.asarray(error + np.where(size > 0, FLUSHED * (1 + np.abs(slope.value)), 0.0))

    def _analyse(self, expr: Expr) -> Approx:
        running = RunningError.of(self.head, self.given, self.bound.forward)
        found = replace(running, columns=0).analyse(expr)
        shape = self.of_o.shape
        error = np.where(found.overflows, np.inf, found.error)
        value = np.broadcast_to(found.value, shape).astype(np.float64)
        return Approx(value, np.broadcast_to(error, shape))

    def _scatter(self, target: Floats, load: Load, terms: Floats) -> None:
        if not load.indices:
            target += terms.sum()
            return
        indices = [np.broadcast_to(self.head.value(index), terms.shape) for index in load.indices]
        inside: Array = np.ones(terms.shape, dtype=np.bool_)
        for index, length in zip(indices, target.shape, strict=True):
            inside = inside & (index >= 0) & (index < length)
        np.add.at(target, tuple(index[inside] for index in indices), terms[inside])
