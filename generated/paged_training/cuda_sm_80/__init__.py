"""paged_training for cuda.sm_80: calls the module made for D.

Made from specs/paged_training.attn; `attnc compile specs/paged_training.attn` makes it again.
"""

import torch

from . import d128

#: What the modules' CONFIGS hold.
Config = d128.Config
PARAMS = ("D",)
VARIANTS = {
    (128,): d128.paged_training,
}


def paged_training(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {128}:
        q: bf16[T, Hkv * G, D]
        k: bf16[pages, 16, Hkv, D]
        v: bf16[pages, 16, Hkv, D]
        cu_q: i32[B + 1]
        block_table: i32[B, P]
        kv_len: i32[B]
        o: bf16[T, Hkv * G, D]
        lse: f32[T, Hkv * G]
    The last axis of q, k and v is contiguous; every other stride is free.
    Sequence b has the rows cu_q[b] .. cu_q[b + 1] of q and of the results; cu_q[0] is 0.
    Key j of sequence b is row j % 16 of page block_table[b, j // 16].
    Entries of the table past the end of a sequence may hold anything.
    For gradients, a call copies the pages of k and v to rows of memory, B * P * 16 * Hkv * 128 elements each.
    A page that several sequences name gets the sum of theirs, in the order of the table.
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
    return VARIANTS[key](q, k, v, cu_q, block_table, kv_len, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"paged_training was not compiled for {asked}; there is: {'; '.join(there_is)}")
