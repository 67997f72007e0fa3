"""dsa_paged_training for triton: calls what is fastest for the device and the sizes.

Each target has a function of its own in its folder. Made from specs/paged_training.attn; `attnc compile specs/paged_training.attn` makes it again.
"""

import torch

from .._support.by_target import ByTarget

#: What launches the kernels of a target, the compute capabilities that they are for, and whether the CPU runs them too.
TARGETS = {
    "triton": ("triton", 80, None, True),
}
PARAMS = ()
#: Targets by nothing: the first that runs on a device that was not measured.
VARIANTS = {
    (): ("triton",),
}
#: Measured: device and variant -> (largest M, N, batch times heads, and 0 for a call without gradients; target); the first row that admits them decides.
TUNED = {}
CHOICE = ByTarget(__name__, "dsa_paged_training", TARGETS, VARIANTS, TUNED)


def dsa_paged_training(
    q: torch.Tensor,
    k: torch.Tensor,
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
        q: bf16[B, M, G, 576]
        k: bf16[pages, 64, 1, 576]
        block_table: i32[B, P]
        kv_len: i32[B]
        selected: i32[B, M, S]
        o: bf16[B, M, G, 512]
        lse: f32[B, G, M]
    The last axis of q, k and v is contiguous; every other stride is free.
    Key j of sequence b is row j % 64 of page block_table[b, j // 64].
    Entries of the table past the end of a sequence may hold anything.
    The values are the first columns of k.
    For gradients, a call copies the pages of k to rows of memory, B * P * 64 * 576 elements.
    A page that several sequences name gets the sum of theirs, in the order of the table.
    out: (o, lse) to write to.
    target: which one, instead of the table's choice.
    options: what the function of that target takes besides.

    Returns (o, lse).
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
        return CHOICE.any()(q, k, block_table, kv_len, selected, out=out, **options)
    key = ()
    if key not in VARIANTS:
        raise _unknown(key)
    function = CHOICE.named(target, key) if target else CHOICE.only(q.device, key)
    if function is None:
        sizes = (
            q.shape[1],
            block_table.shape[1] * 64,
            q.shape[0] * q.shape[2],
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad),
        )
        function = CHOICE.fastest(q.device, key, sizes)
    return function(q, k, block_table, kv_len, selected, out=out, **options)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"dsa_paged_training was not compiled for {asked}; there is: {'; '.join(there_is)}")
