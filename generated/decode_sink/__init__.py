"""decode_sink for cuda.sm_90a, triton, cuda.sm_80: calls what is fastest for the device, D and the sizes.

Each target has a function of its own in its folder. Made from specs/decode.attn; `attnc compile specs/decode.attn` makes it again.
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
    (64,): ("cuda.sm_90a", "triton", "cuda.sm_80"),
}
#: Measured: device and variant -> (largest M, N, batch times heads, and 0 for a call without gradients; target); the first row that admits them decides.
TUNED = {
    ("NVIDIA H200", (64,)): (
        ((None, None, 64, None), "cuda.sm_90a"),
        ((None, 8192, None, None), "cuda.sm_90a"),
        ((None, None, None, None), "cuda.sm_80"),
    ),
}
CHOICE = ByTarget(__name__, "decode_sink", TARGETS, VARIANTS, TUNED)


def decode_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    target: str | None = None,
    out: torch.Tensor | None = None,
    **options: object,
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
        and isinstance(block_table, torch.Tensor)
        and block_table.dim() == 2
        and not block_table.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return CHOICE.any()(q, k, v, sink, block_table, kv_len, out=out, **options)
    key = (q.shape[3],)
    if key not in VARIANTS:
        raise _unknown(key)
    function = CHOICE.named(target, key) if target else CHOICE.only(q.device, key)
    if function is None:
        sizes = (
            q.shape[1],
            block_table.shape[1] * 16,
            q.shape[0] * q.shape[2],
            False,
        )
        function = CHOICE.fastest(q.device, key, sizes)
    return function(q, k, v, sink, block_table, kv_len, out=out, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"decode_sink was not compiled for {asked}; there is: {'; '.join(there_is)}")
