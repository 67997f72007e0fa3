"""differential for cuda.sm_80: calls the module made for D.

Made from specs/differential.attn; `attnc compile specs/differential.attn` makes it again.
"""

import torch

from . import d128

#: What the modules' CONFIGS hold.
Config = d128.Config
PARAMS = ("D",)
VARIANTS = {
    (128,): d128.differential,
}


def differential(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    amount: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    attention: torch.Tensor | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> torch.Tensor:
    """Attention of the spec's score, masked: o = where(h % 2 == 0, 1, -sigmoid(amount[b, q_idx, h // 2]))
    * attention, with attention = softmax(score) v.

    Shapes and dtypes, for D in {128}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[B, N, Hkv, D]
        v: bf16[B, N, Hkv, D]
        amount: bf16[B, M, pairs]
        o: bf16[B, M, Hkv * G, D]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    out: a tensor to write to.
    lse: f32[B, H, M] to write the rows' log-sum-exp to, if wanted.
    attention: bf16[B, M, H, 128] to write the attention before the epilogue to, if wanted.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k, v, amount.

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
    return VARIANTS[key](q, k, v, amount, out=out, lse=lse, attention=attention, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"differential was not compiled for {asked}; there is: {'; '.join(there_is)}")
