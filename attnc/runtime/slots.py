"""Writing keys and values of new tokens into pages, by slot, in one kernel: nothing waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnc.runtime.devices import on_device_of

#: The largest number of types of 8 bits.
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _saturate(x, scale, MOST: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Divides rows by their scale; what is larger than the largest number becomes that, and NaN stays."""
    x = x.to(tl.float32) / scale
    x = tl.maximum(x, -MOST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _store(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    K, V, K_cache, V_cache, slots,
    stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kp, stride_kr, stride_kc, stride_vp, stride_vr, stride_vc,
    page, H, D, Dv, k_scale, v_scale, stride_ks, stride_vs, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Writes the row of token t, of all heads, in program t. MOST: the largest number of a cache of 8 bits,
    into which rows go divided by their scales; 0: of others, into which they go as they are.
    """
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:
        p, r = slot // page, slot % page
        at = tl.arange(0, BLOCK)
        h, d = at // D, at % D
        x = tl.load(K + t * stride_kt + h * stride_kh + d, mask=h < H, other=0.0)
        if MOST > 0:
            x = _saturate(x, tl.load(k_scale + h * stride_ks, mask=h < H, other=1.0), MOST)
        tl.store(K_cache + p * stride_kp + r * stride_kr + h * stride_kc + d, x, mask=h < H)
        h, d = at // Dv, at % Dv
        x = tl.load(V + t * stride_vt + h * stride_vh + d, mask=h < H, other=0.0)
        if MOST > 0:
            x = _saturate(x, tl.load(v_scale + h * stride_vs, mask=h < H, other=1.0), MOST)
        tl.store(V_cache + p * stride_vp + r * stride_vr + h * stride_vc + d, x, mask=h < H)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes token t to row slots[t] % page of page slots[t] // page, for each t below len(slots).

    k: [T, H, D]; v: [T, H, Dv]; k_cache: [pages, page, H, D]; v_cache: [pages, page, H, Dv], with any strides
    but a contiguous last axis; slots: i32 or i64 [at most T], negative for tokens that go nowhere.
    scales: of k and v, f32 of one element or [H]: caches of float8_e4m3fn or float8_e5m2 get k and v divided
    by them, rounded to nearest, and the largest number for what is larger.
    ValueError names an argument of another shape, TypeError one of another dtype than its cache.
    """
    quantised = k_cache.dtype in LARGEST
    if quantised and scales is None:
        raise TypeError(f"scales: expected those of k and v, for a cache of {k_cache.dtype}, got None")
    first, second = (k, v) if scales is None else scales
    _, page, heads, size = k_cache.shape
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.shape[1:] != cache.shape[2:] or cache.shape[:3] != k_cache.shape[:3]:
            raise ValueError(
                f"{name}: expected rows of shape {list(cache.shape[2:])} for a cache"
                f" {list(k_cache.shape)}, got {list(rows.shape[1:])}"
            )
        if quantised and cache.dtype != k_cache.dtype:
            raise TypeError(f"{name}: expected a cache of {k_cache.dtype}, as of k, got {cache.dtype}")
        if rows.dtype != cache.dtype and not quantised:
            raise TypeError(f"{name}: expected dtype {cache.dtype}, that of the cache, got {rows.dtype}")
        if rows.stride(-1) != 1 or cache.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last axis, got strides {rows.stride()}")
    if len(slots) > min(len(k), len(v)):
        raise ValueError(f"slots: expected at most {min(len(k), len(v))}, got {len(slots)}")
    if len(slots) == 0:
        return
    steps = [0, 0]
    for at, (name, scale) in enumerate((("k", first), ("v", second))):
        if quantised:
            if scale.dtype != torch.float32 or not (scale.numel() == 1 or scale.shape == (heads,)):
                raise ValueError(
                    f"scales: expected f32 of one element or [{heads}] for {name},"
                    f" got {scale.dtype} {list(scale.shape)}"
                )
            if scale.device != k_cache.device:
                raise ValueError(
                    f"scales: expected device {k_cache.device}, of the cache, for {name}, got {scale.device}"
                )
            steps[at] = 0 if scale.numel() == 1 else scale.stride(0)
    width = v_cache.shape[3]
    with on_device_of(k_cache):
        _store[(len(slots),)](
            k, v, k_cache, v_cache, slots,
            *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            page, heads, size, width, first, second, *steps,
            triton.next_power_of_2(heads * max(size, width)), LARGEST.get(k_cache.dtype, 0.0),
        )  # fmt: skip
