"""selected_chunks for cuda.sm_90a: calls what is fastest for the device and the sizes.

Each target has a function of its own in its folder. Made from specs/selected_chunks.attn; `attnc compile specs/selected_chunks.attn` makes it again.
"""

import torch

from .._support.by_target import ByTarget

#: What launches the kernels of a target, the compute capabilities that they are for, and whether the CPU runs them too.
TARGETS = {
    "cuda.sm_90a": ("cupy", 90, 90, False),
}
PARAMS = ()
#: Targets by nothing: the first that runs on a device that was not measured.
VARIANTS = {
    (): ("cuda.sm_90a",),
}
#: Measured: device and variant -> (largest M, N, batch times heads, and 0 for a call without gradients; target); the first row that admits them decides.
TUNED = {}
CHOICE = ByTarget(__name__, "selected_chunks", TARGETS, VARIANTS, TUNED)


def selected_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    selected: torch.Tensor,
    *,
    target: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes:
        q: bf16[T, 64, 128]
        k: bf16[pages, 64, 4, 128]
        v: bf16[pages, 64, 4, 128]
        cu_q: i32[B + 1]
        block_table: i32[B, P]
        kv_len: i32[B]
        selected: i32[T, 4, S]
        o: bf16[T, 64, 128]
        lse: f32[T, 64]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Sequence b has the rows cu_q[b] .. cu_q[b + 1] of q and of the results; cu_q[0] is 0.
    Key j of sequence b is row j % 64 of page block_table[b, j // 64].
    Entries of the table past the end of a sequence may hold anything.
    out: (o, lse) to write to.
    target: which one, instead of the table's choice.
    options: what the function of that target takes besides.

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    # any target says which is no such tensor, and what it expected
    if not (
        isinstance(q, torch.Tensor)
        and q.dim() == 3
        and not q.is_nested
        and isinstance(block_table, torch.Tensor)
        and block_table.dim() == 2
        and not block_table.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return CHOICE.any()(q, k, v, cu_q, block_table, kv_len, selected, out=out, **options)
    key = ()
    if key not in VARIANTS:
        raise _unknown(key)
    function = CHOICE.named(target, key) if target else CHOICE.only(q.device, key)
    if function is None:
        sizes = (
            q.shape[0],
            block_table.shape[1] * 64,
            q.shape[1],
            False,
        )
        function = CHOICE.fastest(q.device, key, sizes)
    return function(q, k, v, cu_q, block_table, kv_len, selected, out=out, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"selected_chunks was not compiled for {asked}; there is: {'; '.join(there_is)}")
