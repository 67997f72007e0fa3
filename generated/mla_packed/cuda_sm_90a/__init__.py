"""mla_packed for cuda.sm_90a: calls the module made for D, Dv.

Made from specs/mla_training.attn; `attnc compile specs/mla_training.attn` makes it again.
"""

import torch

from . import d576_dv512

#: What the modules' CONFIGS hold.
Config = d576_dv512.Config
PARAMS = ("D", "Dv")
VARIANTS = {
    (576, 512): d576_dv512.mla_packed,
}


def mla_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    Dv: int = 512,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {576}, Dv in {512}:
        q: bf16[T, G, D]
        k: bf16[S, 1, D]
        cu_q: i32[B + 1]
        cu_k: i32[B + 1]
        o: bf16[T, G, Dv]
        lse: f32[G, T]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Sequence b has the rows cu_q[b] .. cu_q[b + 1] of q and of the results; cu_q[0] is 0.
    Key j of sequence b is row cu_k[b] + j; cu_k[0] is 0.
    The values are the first columns of k.
    Dv: the value of this param; it picks the module.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k.

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(q, torch.Tensor)
        and q.dim() == 3
        and not q.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (q.shape[2], Dv)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, cu_q, cu_k, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"mla_packed was not compiled for {asked}; there is: {'; '.join(there_is)}")
