"""full for cuda.sm_80: calls the module made for T, D.

Made from specs/full.attn; `attnc compile specs/full.attn` makes it again.
"""

import torch

from . import bf16_d128
from . import bf16_d64
from . import f16_d128
from . import f16_d64

PARAMS = ("T", "D")
VARIANTS = {
    (torch.bfloat16, 128): bf16_d128.full,
    (torch.bfloat16, 64): bf16_d64.full,
    (torch.float16, 128): f16_d128.full,
    (torch.float16, 64): f16_d64.full,
}


def full(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (q.dtype, q.shape[3])
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"full was not compiled for {asked}; there is: {'; '.join(there_is)}")
