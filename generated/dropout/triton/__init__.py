"""dropout for triton: calls the module made for D.

Made from specs/dropout.attn; `attnc compile specs/dropout.attn` makes it again.
"""

import torch

from . import d64

#: What the modules' CONFIGS hold.
Config = d64.Config
PARAMS = ("D",)
VARIANTS = {
    (64,): d64.dropout,
}


def dropout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    p: float | torch.Tensor,
    seed: int | torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = dropout(softmax(score)) v.

    Shapes and dtypes, for D in {64}:
        q: bf16[B, M, H, D]
        k: bf16[B, N, H, D]
        v: bf16[B, N, H, D]
        p: f32[]
        seed: i64[]
        o: bf16[B, M, H, D]
        lse: f32[B, H, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Scalars may be Python numbers or 0-d tensors.
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
        key = (q.shape[3],)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, p, seed, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"dropout was not compiled for {asked}; there is: {'; '.join(there_is)}")
