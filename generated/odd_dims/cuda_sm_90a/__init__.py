"""odd_dims for cuda.sm_90a: calls the module made for D, Dv.

Made from specs/odd_dims.attn; `attnc compile specs/odd_dims.attn` makes it again.
"""

import torch

from . import d80_dv96

#: What the modules' CONFIGS hold.
Config = d80_dv96.Config
PARAMS = ("D", "Dv")
VARIANTS = {
    (80, 96): d80_dv96.odd_dims,
}


def odd_dims(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {80}, Dv in {96}:
        q: f16[B, M, Hkv * 3, D]
        k: f16[B, N, Hkv, D]
        v: f16[B, N, Hkv, Dv]
        o: f16[B, M, Hkv * 3, Dv]
        lse: f32[B, M, Hkv * 3]
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
        and isinstance(v, torch.Tensor)
        and v.dim() == 4
        and not v.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (q.shape[3], v.shape[3])
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"odd_dims was not compiled for {asked}; there is: {'; '.join(there_is)}")
