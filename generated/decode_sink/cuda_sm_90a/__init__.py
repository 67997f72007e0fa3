"""decode_sink for cuda.sm_90a: calls the module made for D.

Made from specs/decode.attn; `attnc compile specs/decode.attn` makes it again.
"""

import torch

from . import d64

#: What the modules' CONFIGS hold.
Config = d64.Config
PARAMS = ("D",)
VARIANTS = {
    (64,): d64.decode_sink,
}


def decode_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Attention of the spec's score, masked: o = softmax(score, sink) v.

    Shapes and dtypes, for D in {64}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[pages, 16, Hkv, D]
        v: bf16[pages, 16, Hkv, D]
        sink: f32[Hkv * G]
        block_table: i32[B, P]
        kv_len: i32[B]
        o: bf16[B, M, Hkv * G, D]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Key j of sequence b is row j % 16 of page block_table[b, j // 16].
    Entries of the table past the end of a sequence may hold anything.
    out: a tensor to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).

    Returns o.
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
    return VARIANTS[key](q, k, v, sink, block_table, kv_len, out=out, config=config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"decode_sink was not compiled for {asked}; there is: {'; '.join(there_is)}")
