"""kv8_decode for cuda.sm_90a: calls the module made for KV.

Made from specs/kv8_decode.attn; `attnc compile specs/kv8_decode.attn` makes it again.
"""

import torch

from . import e4m3
from . import bf16

#: What the modules' CONFIGS hold.
Config = e4m3.Config | bf16.Config
PARAMS = ("KV",)
VARIANTS = {
    (torch.float8_e4m3fn,): e4m3.kv8_decode,
    (torch.bfloat16,): bf16.kv8_decode,
}


def kv8_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = v_scale * softmax(score) v.

    Shapes and dtypes, for KV in {e4m3, bf16}:
        q: bf16[B, M, Hkv * G, 128]
        k: KV[pages, 16, Hkv, 128]
        v: KV[pages, 16, Hkv, 128]
        block_table: i32[B, P]
        kv_len: i32[B]
        k_scale: f32[Hkv]
        v_scale: f32[Hkv]
        o: bf16[B, M, Hkv * G, 128]
        lse: f32[B, Hkv * G, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Key j of sequence b is row j % 16 of page block_table[b, j // 16].
    Entries of the table past the end of a sequence may hold anything.
    The numbers of k and v are converted to bf16, which holds them exactly.
    Of e4m3 they need a GPU of compute capability 8.9 or newer.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(k, torch.Tensor)
        and k.dim() == 4
        and not k.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (k.dtype,)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, block_table, kv_len, k_scale, v_scale, out=out, config=config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"kv8_decode was not compiled for {asked}; there is: {'; '.join(there_is)}")
