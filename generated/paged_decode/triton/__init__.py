"""paged_decode for triton: calls the module made for D.

Made from specs/paged_decode.attn; `attnc compile specs/paged_decode.attn` makes it again.
"""

from . import d128
from . import d64

VARIANTS = {
    (128,): d128.paged_decode,
    (64,): d64.paged_decode,
}


def paged_decode(q, k, v, block_table, kv_len, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    try:
        key = (q.shape[3],)
    except (AttributeError, IndexError):  # not such a tensor: any variant says which, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise ValueError(f"paged_decode was not compiled for (D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, block_table, kv_len, **options)
