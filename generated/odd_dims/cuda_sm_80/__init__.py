"""odd_dims for cuda.sm_80: calls the module made for D, Dv.

Made from specs/odd_dims.attn; `attnc compile specs/odd_dims.attn` makes it again.
"""

import torch

from . import d80_dv96

VARIANTS = {
    (80, 96): d80_dv96.odd_dims,
}


def odd_dims(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4 and isinstance(v, torch.Tensor) and v.dim() == 4:
        key = (q.shape[3], v.shape[3])
    if key not in VARIANTS:
        raise ValueError(f"odd_dims was not compiled for (D, Dv) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, **options)
