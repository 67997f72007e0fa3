"""Writing keys and values of new tokens into pages, by slot, in one kernel: nothing waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _store(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    K, V, K_cache, V_cache, slots,
    stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kp, stride_kr, stride_kc, stride_vp, stride_vr, stride_vc,
    page, H, D, Dv, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the row of token t, of all heads, in program t."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:
        p, r = slot // page, slot % page
        at = tl.arange(0, BLOCK)
        h, d = at // D, at % D
        x = tl.load(K + t * stride_kt + h * stride_kh + d, mask=h < H, other=0.0)
        tl.store(K_cache + p * stride_kp + r * stride_kr + h * stride_kc + d, x, mask=h < H)
        h, d = at // Dv, at % Dv
        x = tl.load(V + t * stride_vt + h * stride_vh + d, mask=h < H, other=0.0)
        tl.store(V_cache + p * stride_vp + r * stride_vr + h * stride_vc + d, x, mask=h < H)


def store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes token t to row slots[t] % page of page slots[t] // page, for each t below len(slots).

    k: [T, H, D]; v: [T, H, Dv]; k_cache: [pages, page, H, D]; v_cache: [pages, page, H, Dv], with any strides
    but a contiguous last axis; slots: i32 or i64 [at most T], negative for tokens that go nowhere.
    ValueError names an argument of another shape, TypeError one of another dtype than its cache.
    """
    _, page, heads, size = k_cache.shape
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.shape[1:] != cache.shape[2:] or cache.shape[:3] != k_cache.shape[:3]:
            raise ValueError(
                f"{name}: expected rows of shape {list(cache.shape[2:])} for a cache"
                f" {list(k_cache.shape)}, got {list(rows.shape[1:])}"
            )
        if rows.dtype != cache.dtype:
            raise TypeError(f"{name}: expected dtype {cache.dtype}, that of the cache, got {rows.dtype}")
        if rows.stride(-1) != 1 or cache.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last axis, got strides {rows.stride()}")
    if len(slots) > min(len(k), len(v)):
        raise ValueError(f"slots: expected at most {min(len(k), len(v))}, got {len(slots)}")
    if len(slots) == 0:
        return
    width = v_cache.shape[3]
    _store[(len(slots),)](
        k, v, k_cache, v_cache, slots,
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        page, heads, size, width, triton.next_power_of_2(heads * max(size, width)),
    )  # fmt: skip
