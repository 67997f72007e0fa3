"""hstu for cuda.sm_80: calls the module made for D, GROUP.

Made from specs/hstu.attn; `attnc compile specs/hstu.attn` makes it again.
"""

import torch

from . import d128_group1
from . import d128_group4
from . import d64_group1
from . import d64_group4

#: What the modules' CONFIGS hold.
Config = d128_group1.Config | d128_group4.Config | d64_group1.Config | d64_group4.Config
PARAMS = ("D", "GROUP")
VARIANTS = {
    (128, 1): d128_group1.hstu,
    (128, 4): d128_group4.hstu,
    (64, 1): d64_group1.hstu,
    (64, 4): d64_group4.hstu,
}


def hstu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    targets: torch.Tensor,
    context: torch.Tensor,
    *,
    GROUP: int = 1,
    out: torch.Tensor | None = None,
    config: Config | None = None,
    backward_config: dict[str, Config] | None = None,
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
    config: one of the module's CONFIGS (default: the measured choice for the device, or the first).
    backward_config: by kernel, one of the module's BACKWARD_CONFIGS; for the gradients of q, k, v.

    Returns o.
    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if (
        isinstance(q, torch.Tensor)
        and q.dim() == 3
        and not q.is_nested
        and torch._C._get_tracing_state() is None
    ):
        key = (q.shape[2], GROUP)
    else:  # any variant says which argument is no such tensor, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise _unknown(key)
    return VARIANTS[key](q, k, v, ends, targets, context, out=out, config=config, backward_config=backward_config)


def _unknown(values):
    """The error that says what was asked for, and what there is."""
    asked, *there_is = (", ".join(map("{} = {}".format, PARAMS, variant)) for variant in (values, *VARIANTS))
    return ValueError(f"hstu was not compiled for {asked}; there is: {'; '.join(there_is)}")
