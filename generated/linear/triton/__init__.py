"""linear for triton: calls the module made for T.

Made from specs/linear.attn; `attnc compile specs/linear.attn` makes it again.
"""

import torch

from . import bf16
from . import f16
from . import f32

#: What the modules' CONFIGS hold.
Config = bf16.Config | f16.Config | f32.Config
PARAMS = ("T",)
VARIANTS = {
    (torch.bfloat16,): bf16.linear,
    (torch.float16,): f16.linear,
    (torch.float32,): f32.linear,
}


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """A linear layer: y = x w^T.

    Shapes and dtypes, for T in {bf16, f16, f32}:
        x: T[M, K]
        w: T[N, K]
        y: T[M, N]
    out: y to write to.
    config: one of the module's CONFIGS (default: the measured choice, or a guess).

    Returns y.
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(x, torch.Tensor)
        and x.dim() == 2
        and not x.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (x.dtype,)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](x, w, out=out, config=config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"linear was not compiled for {asked}; there is: {'; '.join(there_is)}")
