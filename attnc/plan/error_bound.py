"""The parameters of the error bound, read off the plan's decisions."""

from __future__ import annotations

from attnc.expr.nodes import Const
from attnc.model.attention import Attention
from attnc.model.schedule import Config
from attnc.model.tensors import DType, Role, Tensor
from attnc.plan.ir import ErrorBound, Softmax

#: tf32x3 splits an f32 into three tf32 parts and drops the smallest cross products.
TF32X3_PRODUCT_ERROR = 2.0**-20
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
        intrinsics=(("tanh", TANH_ERROR),),
        renormalised=softmax.rescale == "every_step",
    )


def feature(tensor: Tensor) -> int:
    """D of q or k, Dv of v or o: a constant in a variant."""
    axis = tensor.axis(Role.FEATURE)
    size = None if axis is None else tensor.shape[axis]
    if not (isinstance(size, Const) and isinstance(size.value, int)):
        raise ValueError(f"the feature axis of {tensor.name} is not a constant: {size}")
    return size.value


def _dtype(tensor: Tensor) -> DType:
    if not isinstance(tensor.dtype, DType):
        raise ValueError(f"the dtype of {tensor.name} is still the param {tensor.dtype}")
    return tensor.dtype
