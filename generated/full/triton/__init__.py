"""full for triton: calls the module made for T, D.

Made from specs/full.attn; `attnc compile specs/full.attn` makes it again.
"""

import torch

from . import bf16_d128
from . import bf16_d64
from . import f16_d128
from . import f16_d64

VARIANTS = {
    (torch.bfloat16, 128): bf16_d128.full,
    (torch.bfloat16, 64): bf16_d64.full,
    (torch.float16, 128): f16_d128.full,
    (torch.float16, 64): f16_d64.full,
}


def full(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (q.dtype, q.shape[3])
    if key not in VARIANTS:
        raise ValueError(f"full was not compiled for (T, D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, **options)
