"""alibi for triton: calls the module made for D.

Made from specs/alibi.attn; `attnc compile specs/alibi.attn` makes it again.
"""

import torch

from . import d64

VARIANTS = {
    (64,): d64.alibi,
}


def alibi(q, k, v, slope, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (q.shape[3],)
    if key not in VARIANTS:
        raise ValueError(f"alibi was not compiled for (D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, slope, **options)
