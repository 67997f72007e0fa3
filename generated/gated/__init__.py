"""gated for cuda.sm_90a, triton, cuda.sm_80: calls what is fastest for the device, D and the sizes.

Each target has a function of its own in its folder. Made from specs/gated.attn; `attnc compile specs/gated.attn` makes it again.
"""

import torch

from .._support.by_target import ByTarget

#: What launches the kernels of a target, the compute capabilities that they are for, and whether the CPU runs them too.
TARGETS = {
    "cuda.sm_90a": ("cupy", 90, 90, False),
    "triton": ("triton", 80, None, True),
    "cuda.sm_80": ("cupy", 80, None, False),
}
PARAMS = ("D",)
#: Targets by D: the first that runs on a device that was not measured.
VARIANTS = {
    (128,): ("cuda.sm_90a", "triton", "cuda.sm_80"),
    (256,): ("cuda.sm_90a", "triton", "cuda.sm_80"),
}
#: Measured: device and variant -> (largest M, N, batch times heads, and 0 for a call without gradients; target); the first row that admits them decides.
TUNED = {}
CHOICE = ByTarget(__name__, "gated", TARGETS, VARIANTS, TUNED)


def gated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    *,
    target: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    attention: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """Attention of the spec's score, masked: o = sigmoid(gate[b, q_idx, h, d]) * attention, with attention
    = softmax(score) v.

    Shapes and dtypes, for D in {128, 256}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[B, N, Hkv, D]
        v: bf16[B, N, Hkv, D]
        gate: bf16[B, M, Hkv * G, D]
        o: bf16[B, M, Hkv * G, D]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    out: a tensor to write to.
    lse: f32[B, H, M] to write the rows' log-sum-exp to, if wanted.
    attention: bf16[B, M, H, 128] to write the attention before the epilogue to, if wanted.
    target: which one, instead of the table's choice.
    options: what the function of that target takes besides.

    Returns o.
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    # any target says which is no such tensor, and what it expected
    if not (
        isinstance(q, torch.Tensor)
        and q.dim() == 4
        and not q.is_nested
        and isinstance(k, torch.Tensor)
        and k.dim() == 4
        and not k.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return CHOICE.any()(q, k, v, gate, out=out, lse=lse, attention=attention, **options)
    key = (q.shape[3],)
    if key not in VARIANTS:
        raise _unknown(key)
    function = CHOICE.named(target, key) if target else CHOICE.only(q.device, key)
    if function is None:
        sizes = (
            q.shape[1],
            k.shape[1],
            q.shape[0] * q.shape[2],
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or gate.requires_grad),
        )
        function = CHOICE.fastest(q.device, key, sizes)
    return function(q, k, v, gate, out=out, lse=lse, attention=attention, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"gated was not compiled for {asked}; there is: {'; '.join(there_is)}")
