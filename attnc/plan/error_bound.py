"""The parameters of the error bound, read off the plan's decisions.

Products of f32 on tensor cores (3xTF32). An operand x is large + small, each with the 11 significant bits
of a tf32: |small| <= 2^-11 |x|, and what is left of x is at most 2^-11 |small| <= 2^-22 |x|. (Rounding to
nearest has that, and so has cutting off x (1 + 2^-11): between a half and the whole of the last bit is added
before up to the whole is taken away, and the more, the larger x is beside that bit.) A product of two
such sums leaves out small small, another 2^-22. Together a product is wrong by less than
3 2^-22 (1 + 2^-11) < 2^-20 of itself.

Sums on tensor cores are not rounded to nearest: the addends of an mma are shifted to the exponent of the
largest one, with one bit more than a float has (on newer chips two), and what does not fit is cut off; so
is the result (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021).
Four products and the sum before are added at once, five addends that lose u = 2^-24 of the largest each and a
result that loses 2u: at most 7/4 u for each product, where rounding to nearest has u. (Eight products at once
and two more bits make it 13/16 u; which chip a kernel will run on is not known here.) The bound counts 2u
(`addition_error`). The sum of each tile starts at 0 and is added to the accumulators by itself, rounded to
nearest, so that a long row of keys is not cut off once in every step; `sums` has 2u for every key of a tile.
The CUDA kernels say so, and Triton's compiler makes the same of a dot in "tf32x3": small products first, then
the large one, then an ordinary addition."""

from __future__ import annotations

from attnc.model.attention import Attention
from attnc.model.schedule import Config
from attnc.model.tensors import DType, Tensor
from attnc.plan.columns import feature
from attnc.plan.ir import ErrorBound, Softmax

#: Relative error of a product of f32 in three of tf32.
TF32X3_PRODUCT_ERROR = 2.0**-20
#: Relative error of an addition that is rounded to nearest, and of one that is cut off.
_ROUNDED, _CUT_OFF = 2.0**-24, 2.0**-23
#: Absolute error of tanh(x) = 1 - 2 / (exp2(2 x log2 e) + 1) in float32: three roundings near 1 and two ulps
#: each of exp2 and division.
TANH_ERROR = 2.0**-21


def error_bound(attention: Attention, configs: tuple[Config, ...], softmax: Softmax) -> ErrorBound:
    """The bound's parameters for the worst config: the longest partial sums, and the most tiles."""
    tiles = [tile for config in configs if isinstance(tile := config["tile.kv"], int)]
    element = _dtype(attention.q)
    return ErrorBound(
        head_dim=feature(attention.q),
        value_dim=feature(attention.v),
        input_dtype=element,
        p_dtype=_dtype(attention.v),
        o_dtype=_dtype(attention.o),
        tile_kv=max(tiles),
        min_tile_kv=min(tiles),
        product_error=TF32X3_PRODUCT_ERROR if element is DType.F32 else 0.0,
        addition_error=_CUT_OFF if element is DType.F32 else _ROUNDED,
        intrinsics=(("tanh", TANH_ERROR),),
        renormalised=softmax.rescale == "every_step",
    )


def _dtype(tensor: Tensor) -> DType:
    if not isinstance(tensor.dtype, DType):
        raise ValueError(f"the dtype of {tensor.name} is still the param {tensor.dtype}")
    return tensor.dtype
