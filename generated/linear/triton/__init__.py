"""linear for triton: calls the module made for T.

Made from specs/linear.attn; `attnc compile specs/linear.attn` makes it again.
"""

import torch

from . import bf16
from . import f16
from . import f32

VARIANTS = {
    (torch.bfloat16,): bf16.linear,
    (torch.float16,): f16.linear,
    (torch.float32,): f32.linear,
}


def linear(x, w, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    # Where an argument is no such tensor, any variant says which, and what it expected.
    key = next(iter(VARIANTS))
    if isinstance(x, torch.Tensor) and x.dim() == 2:
        key = (x.dtype,)
    if key not in VARIANTS:
        raise ValueError(f"linear was not compiled for (T) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](x, w, **options)
