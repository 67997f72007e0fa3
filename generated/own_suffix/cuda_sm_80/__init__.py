"""own_suffix for cuda.sm_80: calls the module made for D.

Made from specs/shared_prefix.attn; `attnc compile specs/shared_prefix.attn` makes it again.
"""

import torch

from . import d128

VARIANTS = {
    (128,): d128.own_suffix,
}


def own_suffix(q, k, v, block_table, kv_len, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (q.shape[3],)
    if key not in VARIANTS:
        raise ValueError(f"own_suffix was not compiled for (D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, block_table, kv_len, **options)
