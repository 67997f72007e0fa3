"""What a kernel promises of its errors."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.model.dtypes import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBound:
    """Parameters of the componentwise forward error bound that the kernel promises (Blanchard, Higham,
    Higham; arXiv 1909.03469).

    Filled by the plan, evaluated by `verify.tolerance` together with the score's own running error analysis.

    tile_kv, min_tile_kv: most and fewest keys that one partial sum may hold, over all configs; the fewest
    give the number of tiles
    splits: partial results joined
    product_error, addition_error: of a product in a dot (0 where products are exact in f32), of an addition
    chained: the products of p and v, and those of a gradient, pass from tile to tile through one sum of the
    tensor cores
    exp_ulps: error of the target's exp2; intrinsics: (name, relative error, absolute error) of the functions
    of scores
    renormalised: o is rescaled at every step (FlashAttention-1), which adds roundings per tile
    largest_shift: how far what the exponent subtracts may be from the row's maximum, and from 0 (a unified
    maximum); least_probability: what the row's largest probability may be stored as; most_probability: what
    any may be, where a scale of v multiplies it
    columns: tensor cores add the terms of the score to its product, and positions are counted from the first
    of so many keys (0: neither); columns_factor: what terms are divided by there, if less than 1
    tail: what probabilities of a row are wrong by besides, all together
    left_out: keys of at most this probability, divided by their number, may be left out
    segment: keys of partial results that are joined one after the other (0: there are none)
    summand_error: of a number in a sum over the keys of a tile, on tensor cores, which takes it as a sum of
    shorter ones (stick-breaking)
    """

    head_dim: int
    input_dtype: DType
    p_dtype: DType
    o_dtype: DType
    tile_kv: int
    min_tile_kv: int
    splits: int = 1
    product_error: float = 0.0
    addition_error: float = 1.5 * 2.0**-24
    chained: bool = False
    exp_ulps: float = 2.0
    intrinsics: tuple[tuple[str, float, float], ...] = ()
    renormalised: bool = False
    largest_shift: float = 0.0
    least_probability: float = 1.0
    most_probability: float = 1.0
    columns: int = 0
    columns_factor: float = 1.0
    tail: float = 0.0
    left_out: float = 0.0
    segment: int = 0
    summand_error: float = 0.0

    def joining_error(self, keys: int) -> int:
        """Returns what joining segments costs, in roundings: of each two factors, two products and a sum."""
        return 6 * -(-keys // self.segment) if self.segment else 0

    def dot_error(self, length: int) -> float:
        """Bounds the error of a sum of so many products, relative to the sum of their magnitudes."""
        return (length + 3) * self.addition_error + self.product_error
