"""One request whose keys and values are ordinary tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import (
    LOG2E,
    check_layout,
    choose_scale,
    choose_tile_rows,
    combine_scales,
    compute_alibi_slopes,
    declare_mask,
    declare_slopes,
    write_mask,
    write_position_terms,
)
from attnc.adapters.specs import NARROW, Kernel, Wanted, kernel, number_of
from attnc.api.fastest import are_few
from attnc.api.tensors import FLOATS, GivenTensors, refuse_gradients


def attend_alone(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_layout: str,
    pos_encoding_mode: str,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float | None,
    rope: Mapping[str, object],
    scales: Mapping[str, Any],
    causal: bool = False,
    mask: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o: [M, Hq, Dv], lse: f32[M, Hq] in base 2) of q: [M, Hq, D] against k: [N, Hkv, D] and
    v: [N, Hkv, Dv], or [Hkv, N, ...] where kv_layout is "HND".

    function: whose arguments these are, for messages; mask: what `flatten_mask` returns
    """
    check_layout(kv_layout)
    checked, rows = GivenTensors(function), "N Hkv" if kv_layout == "NHD" else "Hkv N"
    checked.check("q", q, "M H D", FLOATS)
    dtype = q.dtype
    checked.check("k", k, f"{rows} D", (dtype,) if dtype is torch.float32 else (dtype, *NARROW), "beside q")
    checked.check("v", v, f"{rows} Dv", (k.dtype,), "like k")
    checked.check_columns(q="D", v="Dv")
    checked.check_groups("q", "k")
    checked.check_rows(q=q, k=k, v=v)
    refuse_gradients(function, q=q, k=k, v=v)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    cache = None if k.dtype == dtype else k.dtype
    softcap = number_of(f"{function}: logits_soft_cap", logits_soft_cap, 0.0)
    terms = write_position_terms(function, pos_encoding_mode, softcap, **rope)
    heads = q.shape[1], k.shape[1]
    given = combine_scales(
        function, (1, heads[1]), q.new_ones((), dtype=torch.float32), **scales, always=cache is not None
    )
    made = _kernel(
        dtype,
        cache,
        q.shape[2],
        v.shape[2],
        choose_scale(function, sm_scale, q.shape[2]),
        write_mask(causal, bool(mask), window_left),
        softcap,
        terms,
        bool(mask),
        frozenset(given),
        choose_tile_rows(len(q), heads) if len(q) > 0 and are_few(len(q)) else 0,
    )
    slopes = {"alibi_slopes": compute_alibi_slopes(heads[0], q.device)} if terms else {}
    named = {"q": q, "k": k, "v": v}
    o, lse = made(**{name: x[None] for name, x in named.items()}, **(mask or {}), **given, **slopes)
    return o[0], lse[0] * LOG2E


@lru_cache(maxsize=256)
def _kernel(
    dtype: torch.dtype,
    cache: torch.dtype | None,
    head_dim: int,
    value_dim: int,
    scale: float,
    mask: str,
    softcap: float,
    terms: tuple[str, ...],
    custom: bool,
    scales: frozenset[str],
    rows: int,
) -> Kernel:
    return kernel(
        Wanted(
            name="single_attention",
            dtype=dtype,
            head_dim=head_dim,
            scale=scale,
            q="[B, M, Hkv * G, D]",
            kv="[B, N, Hkv, D]",
            value="" if value_dim == head_dim else "[B, N, Hkv, Dv]",
            value_dim=0 if value_dim == head_dim else value_dim,
            o=f"[B, M, Hkv * G, {'D' if value_dim == head_dim else 'Dv'}]",
            lse="[B, M, Hkv * G]",
            inputs=(*declare_mask(custom), *declare_slopes(terms)),
            length="",
            mask=mask,
            terms=terms,
            softcap=softcap,
            decode=rows > 0,
            rows=rows or 16,
            cache=cache,
            k_scale="k_scale" if scales else "",
            v_scale="v_scale" if scales else "",
        )
    )
