"""mla_decode for cuda.sm_80: calls the module made for D, Dv.

Made from specs/mla_decode.attn; `attnc compile specs/mla_decode.attn` makes it again.
"""

import torch

from . import d576_dv512

#: What the modules' CONFIGS hold.
Config = d576_dv512.Config
PARAMS = ("D", "Dv")
VARIANTS = {
    (576, 512): d576_dv512.mla_decode,
}


def mla_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    Dv: int = 512,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {576}, Dv in {512}:
        q: bf16[B, M, G, D]
        k: bf16[pages, 64, 1, D]
        block_table: i32[B, P]
        kv_len: i32[B]
        o: bf16[B, M, G, Dv]
        lse: f32[B, G, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Key j of sequence b is row j % 64 of page block_table[b, j // 64].
    Entries of the table past the end of a sequence may hold anything.
    The values are the first columns of k.
    Dv: the value of this param; it picks the module.
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
        key = (q.shape[3], Dv)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, block_table, kv_len, out=out, config=config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"mla_decode was not compiled for {asked}; there is: {'; '.join(there_is)}")
