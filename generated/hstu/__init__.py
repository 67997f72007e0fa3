"""hstu for cuda.sm_90a, triton, cuda.sm_80: calls what is fastest for the device, D, GROUP and the sizes.

Each target has a function of its own in its folder. Made from specs/hstu.attn; `attnc compile specs/hstu.attn` makes it again.
"""

import torch

from .._support.by_target import ByTarget

#: What launches the kernels of a target, the compute capabilities that they are for, and whether the CPU runs them too.
TARGETS = {
    "cuda.sm_90a": ("cupy", 90, 90, False),
    "triton": ("triton", 80, None, True),
    "cuda.sm_80": ("cupy", 80, None, False),
}
PARAMS = ("D", "GROUP")
#: Targets by D, GROUP: the first that runs on a device that was not measured.
VARIANTS = {
    (128, 1): ("cuda.sm_90a", "triton", "cuda.sm_80"),
    (128, 4): ("cuda.sm_90a", "triton", "cuda.sm_80"),
    (64, 1): ("cuda.sm_90a", "triton", "cuda.sm_80"),
    (64, 4): ("cuda.sm_90a", "triton", "cuda.sm_80"),
}
#: Measured: device and variant -> (largest M, N, batch times heads, and 0 for a call without gradients; target); the first row that admits them decides.
TUNED = {}
CHOICE = ByTarget(__name__, "hstu", TARGETS, VARIANTS, TUNED)


def hstu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    targets: torch.Tensor,
    context: torch.Tensor,
    *,
    GROUP: int = 1,
    target: str | None = None,
    out: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """Attention of the spec's score, masked: o = weight v.

    Shapes and dtypes, for D in {128, 64}, GROUP in {1, 4}:
        q: bf16[T, H, D]
        k: bf16[T, H, D]
        v: bf16[T, H, D]
        ends: i32[B + 1]
        targets: i32[B]
        context: i32[B]
        o: bf16[T, H, D]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Sequence b has the rows ends[b] .. ends[b + 1] of q and of the results; ends[0] is 0.
    Key j of sequence b is row ends[b] + j; ends[0] is 0.
    GROUP: the value of this param; it picks the module.
    out: a tensor to write to.
    target: which one, instead of the table's choice.
    options: what the function of that target takes besides.

    Returns o.
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    # any target says which is no such tensor, and what it expected
    if not (
        isinstance(q, torch.Tensor)
        and q.dim() == 3
        and not q.is_nested
        and isinstance(k, torch.Tensor)
        and k.dim() == 3
        and not k.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return CHOICE.any()(q, k, v, ends, targets, context, GROUP=GROUP, out=out, **options)
    key = (q.shape[2], GROUP)
    if key not in VARIANTS:
        raise _unknown(key)
    function = CHOICE.named(target, key) if target else CHOICE.only(q.device, key)
    if function is None:
        sizes = (
            q.shape[0],
            k.shape[0],
            q.shape[1],
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        )
        function = CHOICE.fastest(q.device, key, sizes)
    return function(q, k, v, ends, targets, context, GROUP=GROUP, out=out, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"hstu was not compiled for {asked}; there is: {'; '.join(there_is)}")
