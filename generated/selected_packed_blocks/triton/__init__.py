"""selected_packed_blocks for triton: calls the module made for D.

Made from specs/selected_packed_blocks.attn; `attnc compile specs/selected_packed_blocks.attn` makes it again.
"""

import torch

from . import d128

#: What the modules' CONFIGS hold.
Config = d128.Config
PARAMS = ("D",)
VARIANTS = {
    (128,): d128.selected_packed_blocks,
}


def selected_packed_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    selected: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {128}:
        q: bf16[T, Hkv * G, D]
        k: bf16[T, Hkv, D]
        v: bf16[T, Hkv, D]
        cu_seqlens: i32[B + 1]
        selected: i32[T, Hkv, S]
        o: bf16[T, Hkv * G, D]
        lse: f32[Hkv * G, T]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Sequence b has the rows cu_seqlens[b] .. cu_seqlens[b + 1] of q and of the results; cu_seqlens[0] is 0.
    Key j of sequence b is row cu_seqlens[b] + j; cu_seqlens[0] is 0.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k, v.

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(q, torch.Tensor)
        and q.dim() == 3
        and not q.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (q.shape[2],)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, cu_seqlens, selected, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"selected_packed_blocks was not compiled for {asked}; there is: {'; '.join(there_is)}")
