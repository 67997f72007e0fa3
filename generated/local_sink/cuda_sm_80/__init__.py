"""local_sink for cuda.sm_80: calls the module made for W, D.

Made from specs/local_sink.attn; `attnc compile specs/local_sink.attn` makes it again.
"""

import torch

from . import w128_d64
from . import w4096_d64

#: What the modules' CONFIGS hold.
Config = w128_d64.Config | w4096_d64.Config
PARAMS = ("W", "D")
VARIANTS = {
    (128, 64): w128_d64.local_sink,
    (4096, 64): w4096_d64.local_sink,
}


def local_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor,
    *,
    W: int = 128,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score, sink) v.

    Shapes and dtypes, for W in {128, 4096}, D in {64}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[B, N, Hkv, D]
        v: bf16[B, N, Hkv, D]
        sink: f32[Hkv * G]
        o: bf16[B, M, Hkv * G, D]
        lse: f32[B, Hkv * G, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    W: the value of this param; it picks the module.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k, v, sink.

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(q, torch.Tensor)
        and q.dim() == 4
        and not q.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (W, q.shape[3])
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, sink, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"local_sink was not compiled for {asked}; there is: {'; '.join(there_is)}")
