"""swin for cuda.sm_80: calls the module made for W.

Made from specs/swin.attn; `attnc compile specs/swin.attn` makes it again.
"""

import torch

from . import w7

#: What the modules' CONFIGS hold.
Config = w7.Config
PARAMS = ("W",)
VARIANTS = {
    (7,): w7.swin,
}


def swin(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    *,
    W: int = 7,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> torch.Tensor:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for W in {7}:
        q: f16[B, M, H, 32]
        k: f16[B, N, H, 32]
        v: f16[B, N, H, 32]
        table: f32[(2 * W - 1) * (2 * W - 1), H]
        region: i32[B, W * W]
        o: f16[B, M, H, 32]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    W: the value of this param; it picks the module.
    out: a tensor to write to.
    lse: f32[B, H, M] to write the rows' log-sum-exp to, if wanted.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k, v, table.

    Returns o.
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    key = (W,)
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, table, region, out=out, lse=lse, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"swin was not compiled for {asked}; there is: {'; '.join(there_is)}")
