"""local_sink for cuda.sm_80: calls the module made for W, D.

Made from specs/local_sink.attn; `attnc compile specs/local_sink.attn` makes it again.
"""

import torch

from . import w128_d64
from . import w4096_d64

PARAMS = ("W", "D")
VARIANTS = {
    (128, 64): w128_d64.local_sink,
    (4096, 64): w4096_d64.local_sink,
}


def local_sink(q, k, v, sink, *, W=128, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        key = (W, q.shape[3])
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, sink, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"local_sink was not compiled for {asked}; there is: {'; '.join(there_is)}")
