"""mla_decode for triton: calls the module made for D, Dv.

Made from specs/mla_decode.attn; `attnc compile specs/mla_decode.attn` makes it again.
"""

import torch

from . import d576_dv512

VARIANTS = {
    (576, 512): d576_dv512.mla_decode,
}


def mla_decode(q, k, block_table, kv_len, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4 and isinstance(v, torch.Tensor) and v.dim() == 4:
        key = (q.shape[3], v.shape[3])
    if key not in VARIANTS:
        raise ValueError(f"mla_decode was not compiled for (D, Dv) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, block_table, kv_len, **options)
