"""Errors of what keys take of a stick, and of the gradients of their scores.

Weights are w_j = exp(s_j - sum_{k >= j} r_k), with r = log(1 + exp(s)), of which the derivative is a sigmoid:

    R_j = sigmoid(s_j) (e_j + 2u |s_j|) + (2u (exp_ulps + 1) + 2^-22) r_j        of r_j
    E_j = e_j + 5u |s_j| + sum_{k >= j} (R_k + sums r_k) + 2u P exp_ulps
    sums = t + a (tile_kv + 3) + u (2 T + splits + 10)

R has the exponential in r, and the polynomial of it, whose 2^-22 is relative to r, however small r is. t:
what a number loses as a summand of a tile's sum (`ErrorBound.summand_error`; 0 where lanes of a warp make the
sum, in f32 and in fewer steps); a: what such a sum loses with each.
P: exponentials that a weight is a product of, up to one for each tile and split in a forward, one in a
backward. The gradient of a score is g_j - sigmoid(s_j) t_j, with g_j = w_j dp_j and t_j the sum of dlse and
of g_k over k <= j:

    |t' - t|_j <= sum_{k <= j} |g' - g|_k + sums (|dlse| + sum_{k <= j} |g_k|)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnc.plan.ir import ErrorBound
from attnc.reference import Bools, Floats
from attnc.verify.running_error import FLUSHED, Approx, U, exponential_error

#: Relative error of log(1 + e), the polynomial of e that kernels evaluate.
SOFTPLUS_ERROR = 2.0**-22


def sum_error(bound: ErrorBound, tiles: int) -> float:
    """Returns the error of a number in the sums of a row with so many tiles."""
    in_tile = bound.summand_error + bound.addition_error * (bound.tile_kv + 3)
    return in_tile + U * (2 * tiles + bound.splits + 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class StickErrors:
    """Of scores [M, N]. seen: visible, and not minus infinity; s, left: the scores, and the r above, 0 where
    not seen; left_error: of sums of r, as far as each adds to them; p, p_error: weights.
    """

    seen: Bools
    s: Floats
    score_error: Floats
    left: Floats
    left_error: Floats
    p: Floats
    p_error: Floats
    many: float
    exp_ulps: float

    @staticmethod
    def of(score: Approx, visible: Bools, bound: ErrorBound, many: float, exponentials: int) -> StickErrors:
        """Returns them for scores with their errors. many: what a sum of r loses of each; exponentials: the P
        above.
        """
        s = np.where(visible, np.broadcast_to(score.value, visible.shape).astype(np.float64), -np.inf)
        seen = visible & ~np.isneginf(s)
        error = np.where(seen, np.broadcast_to(score.error, visible.shape), 0.0)
        left = np.where(seen, np.logaddexp(0.0, s), 0.0)
        size = np.where(seen, np.abs(s), 0.0)
        of_left = (error + 2 * U * size) * np.where(seen, np.exp(s - left), 0.0)
        of_left = of_left + (2 * U * (bound.exp_ulps + 1) + SOFTPLUS_ERROR + many) * left + FLUSHED * seen
        exponent_error = error + 5 * U * size + _sum_behind(of_left) + 2 * U * exponentials
        exponents = s - _sum_behind(left)
        p = np.where(seen, np.exp(exponents), 0.0)
        off = np.where(seen, exponential_error(p, exponents, exponent_error), 0.0).clip(max=1.0)
        return StickErrors(
            seen=seen,
            s=s,
            score_error=error,
            left=left,
            left_error=of_left,
            p=p,
            p_error=off,
            many=many,
            exp_ulps=bound.exp_ulps,
        )

    def differentiate(self, dp: Floats, dp_error: Floats, dlse: Floats) -> tuple[Floats, Floats]:
        """Returns the gradients of scores and their errors, from those of weights [M, N] and of lse [M]."""
        given = np.where(self.seen, self.p * dp, 0.0)
        given_error = self.p_error * np.abs(dp) + (self.p + self.p_error) * dp_error
        given_error = np.where(
            self.seen, given_error + 2 * U * np.abs(given) + FLUSHED * (1 + np.abs(dp)), 0.0
        )
        first = dlse[:, None]
        through = first + given.cumsum(axis=1)
        through_error = given_error.cumsum(axis=1) + self.many * (
            np.abs(first) + np.abs(given).cumsum(axis=1)
        )
        exponent = np.where(self.seen, self.s - self.left, -np.inf)
        share = np.exp(exponent)
        exponent_error = self.score_error + self.left_error + 2 * U * self.exp_ulps
        exponent_error = exponent_error + np.where(self.seen, 4 * U * (np.abs(self.s) + self.left), 0.0)
        share_error = exponential_error(share, exponent, exponent_error) + FLUSHED
        ds = given - share * through
        error = given_error + share_error * np.abs(through) + (share + share_error) * through_error
        error = error + 2 * U * (np.abs(given) + np.abs(share * through)) + U * np.abs(ds)
        return np.where(self.seen, ds, 0.0), np.where(self.seen, error, 0.0)


def _sum_behind(x: Floats) -> Floats:
    return np.asarray(np.cumsum(x[:, ::-1], axis=1)[:, ::-1])
