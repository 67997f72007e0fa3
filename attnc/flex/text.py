"""`to_spec`: the spec that mods mean."""

from __future__ import annotations

import torch

from attnc.api.shown import Shown
from attnc.flex.spec import DTYPES, Layout, write_spec
from attnc.flex.trace import MaskMod, ScoreMod, trace

#: Element types of q, k and v by the names that specs have for them.
SPELLED = {name: dtype for dtype, name in DTYPES.items()}
_SIZES = ("B", "H", "M", "N")


def to_spec(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = True,
    gradients: bool = True,
    target: str = "triton",
    name: str = "",
    **sizes: int,
) -> Shown:
    """The text of a spec that computes what torch's FlexAttention does with these mods.

    query, key, value: examples, of which dtype, head_dim and sizes are read; none is needed
    head_dim: None for a param D in {64, 128}
    gradients: of q, k, v and of the captured tensors that require one
    name: of the attention; by default made of those of the mods
    sizes: B, H, M, N. An axis of a captured tensor that has the size of its index is declared so, as in
        `doc: i32[N]`; a size that is not given is that of the first axis with b, h, q_idx or kv_idx as index

    Captured tensors become inputs, in the order in which the mods read them; numbers stand in the text.
    FlexError, with the place in the caller's file, for what no spec can say.
    """
    unknown = sorted({*sizes} - {*_SIZES})
    if unknown:
        raise TypeError(f"to_spec: expected the sizes {', '.join(_SIZES)}, got {', '.join(unknown)}")
    value_dim = None
    if query is not None:
        dtype, head_dim, sizes["B"] = query.dtype, query.shape[3], query.shape[0]
        sizes["H"], sizes["M"] = query.shape[1], query.shape[2]
    if key is not None:
        sizes["N"] = key.shape[2]
        enable_gqa = query is not None and query.shape[1] != key.shape[1]
    if value is not None:
        value_dim = value.shape[3]
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected {', '.join(map(str, DTYPES))}, got {dtype}")
    device = torch.device("cpu") if query is None else query.device
    traced = trace(score_mod, mask_mod, scale=scale, sizes=sizes, device=device, infers=True)
    layout = Layout(
        dtype=DTYPES[dtype],
        head_dim=head_dim,
        value_dim=value_dim,
        grouped=enable_gqa,
        scaled=scale is not None,
        lse=return_lse,
        differentiable=gradients,
        grad=("q", "k", "v") if gradients else (),
        target=target,
    )
    return Shown(write_spec(traced, layout, mods=(score_mod, mask_mod), name=name).text)
