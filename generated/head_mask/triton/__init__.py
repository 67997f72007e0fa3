"""head_mask for triton: calls the module made for D.

Made from specs/head_mask.attn; `attnc compile specs/head_mask.attn` makes it again.
"""

import torch

from . import d128

PARAMS = ("D",)
VARIANTS = {
    (128,): d128.head_mask,
}


def head_mask(q, k, v, reach, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (q.shape[3],)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, reach, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"head_mask was not compiled for {asked}; there is: {'; '.join(there_is)}")
