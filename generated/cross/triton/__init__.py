"""cross for triton: calls the module made for D, Dv.

Made from specs/cross.attn; `attnc compile specs/cross.attn` makes it again.
"""

import torch

from . import d64_dv128

VARIANTS = {
    (64, 128): d64_dv128.cross,
}


def cross(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4 and isinstance(v, torch.Tensor) and v.dim() == 4:
        key = (q.shape[3], v.shape[3])
    if key not in VARIANTS:
        raise ValueError(f"cross was not compiled for (D, Dv) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, **options)
