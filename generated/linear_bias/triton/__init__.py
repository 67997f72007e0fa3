"""linear_bias for triton: calls the module made for T.

Made from specs/linear.attn; `attnc compile specs/linear.attn` makes it again.
"""

import torch

from . import bf16
from . import f16

PARAMS = ("T",)
VARIANTS = {
    (torch.bfloat16,): bf16.linear_bias,
    (torch.float16,): f16.linear_bias,
}


def linear_bias(x, w, bias, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    if isinstance(x, torch.Tensor) and x.dim() == 2:
        key = (x.dtype,)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](x, w, bias, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"linear_bias was not compiled for {asked}; there is: {'; '.join(there_is)}")
