"""The parameters of the error bound, read off the plan's decisions.

Products of f32 on tensor cores (3xTF32). An operand x is large + small, each with the 11 significant bits
of a tf32: |small| <= 2^-11 |x|, and what is left of x is at most 2^-11 |small| <= 2^-22 |x|. (Rounding to
nearest has that, and so has cutting off x (1 + 2^-11): between a half and the whole of the last bit is added
before up to the whole is taken away, and the more, the larger x is beside that bit.) A product of two
such sums leaves out small small, another 2^-22. Together a product is wrong by less than
3 2^-22 (1 + 2^-11) < 2^-20 of itself.

Whatever the type, sums on tensor cores are not rounded to nearest: the addends of an mma are shifted to the
exponent of the largest one, with one bit more than a float has (on newer chips two), and what does not fit
is cut off; so is the result (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores",
PeerJ CS 2021). Where w products and the sum before are added at once, the largest of the w + 1 addends loses
nothing, for it fits a float; each of the others loses u = 2^-24 of it, and the result 2u: (1 + 2/w) u for
each product, where rounding to nearest has u. That is 3/2 u for w = 4 (f32 on sm_80), 5/4 u for 8 (16 bits
there), and less with two bits more. Which chip a kernel will run on is not known here: `addition_error` is
3/2 u.

The same holds for sums over keys, and over rows in gradients, but for two things. First, zeros lose nothing:
n products that are not 0 among N lose n u and 2u for each of the steps that they are in, of which there are
at most n and at most N/4 + 1, together at most 3/2 u min(2n, N + 4). Second, it matters where a sum starts.
With f32 the sum of each tile starts at 0 and is added to the accumulators by itself, rounded to nearest, so
that a long row of keys is not cut off once in every step; `sums` has 2u for every key of a tile. The CUDA
kernels say so, and Triton's compiler makes the same of a dot in "tf32x3": small products first, then the
large one, then an ordinary addition. With 16 bits one chain of mma runs from the first tile to the last
(`chained`), and N is the whole row: beyond 10^5 keys that is more than the rounding of p to f16, and always
towards 0."""

from __future__ import annotations

from attnc.expr.functions import REAL
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.schedule import TileConfig
from attnc.plan.ir import ErrorBound, Softmax
from attnc.plan.ir.kernel import UnifiedMax
from attnc.plan.signature import feature
from attnc.plan.softmax import shift_of

#: Relative error of a product of f32 in three of tf32.
TF32X3_PRODUCT_ERROR = 2.0**-20
#: Relative error of a float as the sum of two bf16 numbers, and of three: of what is left of a number in
#: [1, 2), each part that is cut off takes the next 8 bits, and the last is rounded, to half of its last bit.
TWO_PARTS_ERROR, THREE_PARTS_ERROR = 2.0**-16, 2.0**-24
#: What a sum on tensor cores loses with each product, relative to the sum of the magnitudes.
ADDITION_ERROR = 1.5 * 2.0**-24
#: Relative and absolute errors of the functions of scores.
INTRINSICS = tuple((function.name, function.relative, function.absolute) for function in REAL.values())


def error_bound(
    attention: Attention,
    configs: tuple[TileConfig, ...],
    softmax: Softmax,
    unified: UnifiedMax | None = None,
    splits: int = 1,
    columns: int = 0,
    columns_factor: float = 1.0,
    tail: float = 0.0,
    left_out: float = 0.0,
    *,
    cuts_summands: bool,
) -> ErrorBound:
    """Returns the bound's parameters for the worst config: the longest partial sums, and the most tiles.
    splits: the most results of parts of a row's keys that are joined. columns, columns_factor, tail,
    left_out: as in `ErrorBound`; cuts_summands: as in `Target`.
    """
    element = attention.element
    shift = shift_of(softmax, unified, element, scales_keys=attention.softmax.scales_keys)
    tiles = [config.tile_kv for config in configs]
    return ErrorBound(
        head_dim=feature(attention.q),
        input_dtype=element,
        p_dtype=element,
        o_dtype=DType(attention.o.dtype),
        tile_kv=max(tiles),
        min_tile_kv=min(tiles),
        product_error=TF32X3_PRODUCT_ERROR if element is DType.F32 else 0.0,
        addition_error=ADDITION_ERROR,
        chained=element is not DType.F32,
        intrinsics=INTRINSICS,
        renormalised=softmax.rescale == "every_step",
        splits=splits,
        segment=attention.segment_keys,
        largest_shift=shift.largest,
        least_probability=shift.least_probability,
        most_probability=shift.most_probability if attention.softmax.scales_keys else 1.0,
        columns=columns,
        columns_factor=columns_factor,
        tail=tail,
        left_out=left_out,
        summand_error=_summand_error(attention) if cuts_summands else 0.0,
    )


def _summand_error(attention: Attention) -> float:
    if attention.softmax.form != "stick_breaking":
        return 0.0
    return THREE_PARTS_ERROR if attention.element is DType.F32 else TWO_PARTS_ERROR
