"""extend for triton: calls the module made for D, by the schedule for the sizes.

Made from specs/extend.attn; `attnc compile specs/extend.attn` makes it again.
"""

import torch

from . import d128_split
from . import d128_drafts
from . import d128_rows

#: What the modules' CONFIGS hold.
Config = d128_split.Config | d128_drafts.Config | d128_rows.Config
PARAMS = ("D",)
#: By D, and by schedule.
VARIANTS = {
    (128,): {
        "split": d128_split.extend,
        "drafts": d128_drafts.extend,
        "rows": d128_rows.extend,
    },
}
#: Measured: device and variant -> (largest M, N and batch times heads; schedule); the first row that admits them decides.
TUNED = {
    ("NVIDIA H200", (128,)): (
        ((1, 1024, 16), "split"),
        ((4, 1024, 16), "drafts"),
        ((16, 1024, 16), "split"),
        ((None, 1024, 16), "drafts"),
        ((1, 8192, 16), "split"),
        ((1024, 8192, 16), "drafts"),
        ((None, 8192, 16), "rows"),
        ((4, None, 16), "split"),
        ((None, None, 16), "drafts"),
        ((4, None, None), "split"),
        ((None, None, None), "drafts"),
    ),
}
#: The same for devices that were not measured.
GUESS = (
    ((16, None, None), "split"),
    ((None, None, None), "rows"),
)


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    schedule: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the spec's score, masked: o = softmax(score) v.

    Shapes and dtypes, for D in {128}:
        q: bf16[B, M, Hkv * G, D]
        k: bf16[B, N, Hkv, D]
        v: bf16[B, N, Hkv, D]
        kv_len: i32[B]
        o: bf16[B, M, Hkv * G, D]
        lse: f32[B, Hkv * G, M]
    The last axis of q, k and v is contiguous; every other stride is free, and nothing is copied.
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
        and isinstance(k, torch.Tensor)
        and k.dim() == 4
        and not k.is_nested
        and torch._C._get_tracing_state() is None
    ):
        return _any()(q, k, v, kv_len, out=out, config=config)
    key = (q.shape[3],)
    sizes = (q.shape[1], k.shape[1], q.shape[0] * q.shape[2])
    if key not in VARIANTS:
        raise _unknown(key)
    if schedule is None:
        schedule = _choose(q.device, key, sizes)
    elif schedule not in VARIANTS[key]:
        raise ValueError(f"schedule: expected one of {list(VARIANTS[key])}, got {schedule!r}")
    return VARIANTS[key][schedule](q, k, v, kv_len, out=out, config=config)


def _any():
    return next(iter(next(iter(VARIANTS.values())).values()))


def _choose(device, key, sizes):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for limits, schedule in TUNED.get((name, key), GUESS):
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
    return ValueError(f"extend was not compiled for {asked}; there is: {'; '.join(there_is)}")
