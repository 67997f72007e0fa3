"""selected_blocks for cuda.sm_80: calls the module made for D.

Made from specs/selected_blocks.attn; `attnc compile specs/selected_blocks.attn` makes it again.
"""

import torch

from . import d128

#: What the modules' CONFIGS hold.
Config = d128.Config
PARAMS = ("D",)
VARIANTS = {
    (128,): d128.selected_blocks,
}


def selected_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selected: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {128}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[B, N, Hkv, D]
        v: bf16[B, N, Hkv, D]
        selected: i32[B, M, Hkv, S]
        o: bf16[B, M, Hkv * G, D]
        lse: f32[B, Hkv * G, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).

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
    return VARIANTS[key](q, k, v, selected, out=out, config=config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"selected_blocks was not compiled for {asked}; there is: {'; '.join(there_is)}")
