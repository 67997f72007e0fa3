"""latent_packed for cuda.sm_90a: calls the module made for it, by the schedule for the sizes.

Made from specs/latent_invariant.attn; `attnc compile specs/latent_invariant.attn` makes it again.
"""

import torch

from . import prompt
from . import decode

#: What the modules' CONFIGS hold.
Config = prompt.Config | decode.Config
PARAMS = ()
#: By nothing, and by schedule.
VARIANTS = {
    (): {
        "prompt": prompt.latent_packed,
        "decode": decode.latent_packed,
    },
}
#: Largest M, N and batch times heads, and schedule; the first row that admits them decides. No device was measured.
GUESS = (
    ((None, 1024, None), "prompt"),
    ((1, None, 6335), "decode"),
    ((2, None, 3167), "decode"),
    ((4, None, 1583), "decode"),
    ((8, None, 791), "decode"),
    ((16, None, 395), "decode"),
    ((32, None, 197), "decode"),
    ((64, None, 98), "decode"),
    ((128, None, 49), "decode"),
    ((256, None, 24), "decode"),
    ((512, None, 12), "decode"),
    ((1024, None, 6), "decode"),
    ((2048, None, 3), "decode"),
    ((4096, None, 1), "decode"),
    ((None, None, None), "prompt"),
)


def latent_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    schedule: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes:
        q: bf16[T, G, 576]
        k: bf16[pages, 64, 1, 576]
        cu_q: i32[B + 1]
        block_table: i32[B, P]
        kv_len: i32[B]
        o: bf16[T, G, 512]
        lse: f32[G, T]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Sequence b has the rows cu_q[b] .. cu_q[b + 1] of q and of the results; cu_q[0] is 0.
    Key j of sequence b is row j % 64 of page block_table[b, j // 64].
    Entries of the table past the end of a sequence may hold anything.
    The values are the first columns of k.
    schedule: which one, instead of the table's choice.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    # any module says which is no such tensor, and what it expected
    if not (
        isinstance(q, torch.Tensor)
        and q.dim() == 3
        and not q.is_nested
        and isinstance(block_table, torch.Tensor)
        and block_table.dim() == 2
        and not block_table.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return _any()(q, k, cu_q, block_table, kv_len, out=out, config=config)
    key = ()
    sizes = (q.shape[0], block_table.shape[1] * 64, q.shape[1])
    if key not in VARIANTS:
        raise _unknown(key)
    if schedule is None:
        schedule = _choose(q.device, key, sizes)
    elif schedule not in VARIANTS[key]:
        raise ValueError(f"schedule: expected one of {list(VARIANTS[key])}, got {schedule!r}")
    return VARIANTS[key][schedule](q, k, cu_q, block_table, kv_len, out=out, config=config)


def _any():
    return next(iter(next(iter(VARIANTS.values())).values()))


def _choose(device, key, sizes):
    for limits, schedule in GUESS:
        if all(limit is None or _is_within(size, limit) for size, limit in zip(sizes, limits)):
            return schedule
    raise AssertionError("the last row admits all sizes")


def _is_within(size, limit):
    """Whether a size is known to have this limit: torch.export keeps open sizes open."""
    if torch.compiler.is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(size <= limit)
    return size <= limit


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"latent_packed was not compiled for {asked}; there is: {'; '.join(there_is)}")
