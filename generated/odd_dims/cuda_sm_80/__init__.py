"""odd_dims for cuda.sm_80: calls the module made for D, Dv.

Made from specs/odd_dims.attn; `attnc compile specs/odd_dims.attn` makes it again.
"""

import torch

from . import d80_dv96

PARAMS = ("D", "Dv")
VARIANTS = {
    (80, 96): d80_dv96.odd_dims,
}


def odd_dims(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    if isinstance(q, torch.Tensor) and q.dim() == 4 and isinstance(v, torch.Tensor) and v.dim() == 4:
        key = (q.shape[3], v.shape[3])
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"odd_dims was not compiled for {asked}; there is: {'; '.join(there_is)}")
