"""`to_spec`: the spec that mods mean, to be read and kept."""

from __future__ import annotations

import re

import torch

from attnc.api.family import Shown
from attnc.flex.errors import FlexError
from attnc.flex.places import place_error
from attnc.flex.spec import DTYPES, CallLayout, write_spec
from attnc.flex.trace import MaskMod, ScoreMod, trace
from attnc.model.names import NOT_FUNCTIONS, RESERVED, explain_reserved

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
    """Returns the text of a spec that computes what torch's FlexAttention does with these mods.

    query, key, value: examples, of which dtype, head_dim and sizes are read; none is needed
    head_dim: None for a param D in {64, 128}
    gradients: of q, k, v and of the captured tensors that require one
    name: of the attention; by default made of those of the mods
    sizes: B, H, M, N. An axis of a captured tensor that has the size of its index is declared so, as in
        `doc: i32[N]`; a size that is not given is that of the first axis with b, h, q_idx or kv_idx as index

    Captured tensors become inputs, in the order in which the mods read them; numbers stand in the text.
    Raises FlexError, with the place in the caller's file, for what no spec can say; TypeError for a dtype or
    a size that there is not.
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
    is_taken = name in RESERVED or explain_reserved(name, NOT_FUNCTIONS, is_file=True)
    if name and (is_taken or not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII)):
        raise ValueError(f"name: expected letters, digits and '_', and no reserved word, got {name!r}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected {', '.join(map(str, DTYPES))}, got {dtype}")
    device = torch.device("cpu") if query is None else query.device
    traced = trace(score_mod, mask_mod, scale=scale, sizes=sizes, device=device, infers=True)
    layout = CallLayout(
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
    mods = (score_mod, mask_mod)
    try:
        return Shown(write_spec(traced, layout, mods=mods, name=name).text)
    except FlexError as failure:
        raise place_error(failure, traced, layout, mods) from None
