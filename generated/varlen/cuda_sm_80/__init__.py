"""varlen for cuda.sm_80: calls the module made for D.

Made from specs/varlen.attn; `attnc compile specs/varlen.attn` makes it again.
"""

import torch

from . import d128

VARIANTS = {
    (128,): d128.varlen,
}


def varlen(q, k, v, cu_q, cu_k, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 3:
        key = (q.shape[2],)
    if key not in VARIANTS:
        raise ValueError(f"varlen was not compiled for (D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, cu_q, cu_k, **options)
