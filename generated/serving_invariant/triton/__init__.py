"""serving_invariant for triton: calls the module made for it, by the schedule for the sizes.

Made from specs/serving_invariant.attn; `attnc compile specs/serving_invariant.attn` makes it again.
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
        "prompt": prompt.serving_invariant,
        "decode": decode.serving_invariant,
    },
}
#: Largest M, N and batch times heads, and schedule; the first row that admits them decides. No device was measured.
GUESS = (
    ((16, None, None), "decode"),
    ((None, None, None), "prompt"),
)


def serving_invariant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    schedule: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes:
        q: bf16[B, M, Hkv * G, 128]
        k: bf16[pages, 16, Hkv, 128]
        v: bf16[pages, 16, Hkv, 128]
        block_table: i32[B, P]
        kv_len: i32[B]
        o: bf16[B, M, Hkv * G, 128]
        lse: f32[B, Hkv * G, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
    Key j of sequence b is row j % 16 of page block_table[b, j // 16].
    Entries of the table past the end of a sequence may hold anything.
    schedule: which one, instead of the table's choice.
    out: (o, lse) to write to.
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).

    Returns (o, lse).
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    # any module says which is no such tensor, and what it expected
    if not (
        isinstance(q, torch.Tensor)
        and q.dim() == 4
        and not q.is_nested
        and isinstance(block_table, torch.Tensor)
        and block_table.dim() == 2
        and not block_table.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return _any()(q, k, v, block_table, kv_len, out=out, config=config)
    key = ()
    sizes = (q.shape[1], block_table.shape[1] * 16, q.shape[0] * q.shape[2])
    if key not in VARIANTS:
        raise _unknown(key)
    if schedule is None:
        schedule = _choose(q.device, key, sizes)
    elif schedule not in VARIANTS[key]:
        raise ValueError(f"schedule: expected one of {list(VARIANTS[key])}, got {schedule!r}")
    return VARIANTS[key][schedule](q, k, v, block_table, kv_len, out=out, config=config)


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
    return ValueError(f"serving_invariant was not compiled for {asked}; there is: {'; '.join(there_is)}")
