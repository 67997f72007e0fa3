"""shared_prefix for triton: calls the module made for D.

Made from specs/shared_prefix.attn; `attnc compile specs/shared_prefix.attn` makes it again.
"""

import torch

from . import d128

#: What the modules' CONFIGS hold.
Config = d128.Config
PARAMS = ("D",)
VARIANTS = {
    (128,): d128.shared_prefix,
}


def shared_prefix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score: o = softmax(score) v.

    Shapes and dtypes, for D in {128}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[pages, 16, Hkv, D]
        v: bf16[pages, 16, Hkv, D]
        block_table: i32[B, P]
        kv_len: i32[B]
        o: bf16[B, M, Hkv * G, D]
        lse: f32[B, M, Hkv * G]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Key j of sequence b is row j % 16 of page block_table[b, j // 16].
    Entries of the table past the end of a sequence may hold anything.
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
    return VARIANTS[key](q, k, v, block_table, kv_len, out=out, config=config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"shared_prefix was not compiled for {asked}; there is: {'; '.join(there_is)}")
