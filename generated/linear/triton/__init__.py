"""linear for triton: calls the module made for T.

Made from specs/linear.attn; `attnc compile specs/linear.attn` makes it again.
"""

import torch

from . import bf16
from . import f16
from . import f32

PARAMS = ("T",)
VARIANTS = {
    (torch.bfloat16,): bf16.linear,
    (torch.float16,): f16.linear,
    (torch.float32,): f32.linear,
}


def linear(x, w, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    if isinstance(x, torch.Tensor) and x.dim() == 2:
        key = (x.dtype,)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](x, w, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"linear was not compiled for {asked}; there is: {'; '.join(there_is)}")
