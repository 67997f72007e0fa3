"""full for cuda.sm_80: calls the module made for T, D.

Made from specs/full.attn; `attnc compile specs/full.attn` makes it again.
"""

import torch

from . import bf16_d128
from . import bf16_d64
from . import f16_d128
from . import f16_d64

#: What the modules' CONFIGS hold.
Config = bf16_d128.Config | bf16_d64.Config | f16_d128.Config | f16_d64.Config
PARAMS = ("T", "D")
VARIANTS = {
    (torch.bfloat16, 128): bf16_d128.full,
    (torch.bfloat16, 64): bf16_d64.full,
    (torch.float16, 128): f16_d128.full,
    (torch.float16, 64): f16_d64.full,
}


def full(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score: o = softmax(score) v.

    Shapes and dtypes, for T in {bf16, f16}, D in {128, 64}:
        q: T[B, M, H, D]
        k: T[B, N, H, D]
        v: T[B, N, H, D]
        o: T[B, M, H, D]
        lse: f32[B, H, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k, v.

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(q, torch.Tensor)
        and q.dim() == 4
        and not q.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (q.dtype, q.shape[3])
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"full was not compiled for {asked}; there is: {'; '.join(there_is)}")
