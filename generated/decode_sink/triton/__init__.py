"""decode_sink for triton: calls the module made for D.

Made from specs/decode.attn; `attnc compile specs/decode.attn` makes it again.
"""

import torch

from . import d64

VARIANTS = {
    (64,): d64.decode_sink,
}


def decode_sink(q, k, v, sink, block_table, kv_len, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (q.shape[3],)
    if key not in VARIANTS:
        raise ValueError(f"decode_sink was not compiled for (D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, sink, block_table, kv_len, **options)
