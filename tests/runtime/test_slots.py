"""Keys and values go to their slots, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

from attnc.runtime.slots import LARGEST, store  # noqa: E402  # Triton's interpreter has to be chosen first

H, D, Dv, PAGE = 3, 8, 5, 4


def made(tokens: int = 6) -> tuple[torch.Tensor, ...]:
    """k and v with strides of their own, and caches: keys by heads, values by rows."""
    k = torch.randn(tokens, 2 * H, D)[:, ::2]
    v = torch.randn(H, tokens, Dv).transpose(0, 1)
    k_cache = torch.zeros(7, H, PAGE, D).transpose(1, 2)
    return k, v, k_cache, torch.zeros(7, PAGE, H, Dv)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tokens_go_to_their_slots(dtype: torch.dtype) -> None:
    k, v, k_cache, v_cache = made()
    slots = [9, -1, 0, 27, 13]  # the last of six tokens has none
    store(k, v, k_cache, v_cache, torch.tensor(slots, dtype=dtype))
    rows, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for slot in range(len(rows)):
        token = slots.index(slot) if slot in slots else None
        assert torch.equal(rows[slot], torch.zeros(H, D) if token is None else k[token])
        assert torch.equal(values[slot], torch.zeros(H, Dv) if token is None else v[token])


def test_no_tokens_are_no_launch() -> None:
    k, v, k_cache, v_cache = made(0)
    store(k, v, k_cache, v_cache, torch.zeros(0, dtype=torch.int64))


def test_wrong_arguments_are_named() -> None:
    k, v, k_cache, v_cache = made()
    slots = torch.arange(6)
    with pytest.raises(ValueError, match=r"k: expected rows of shape \[3, 8\] .*, got \[2, 8\]"):
        store(k[:, :2], v, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"v: expected rows of shape \[3, 5\]"):
        store(k, v, k_cache, v_cache[:5], slots)
    with pytest.raises(ValueError, match="v: expected a contiguous last axis"):
        store(k, v.mT.contiguous().mT, k_cache, v_cache, slots)
    with pytest.raises(
        TypeError, match=r"k: expected dtype torch.float32, that of the cache, got torch.float16"
    ):
        store(k.half(), v, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="slots: expected at most 6, got 7"):
        store(k, v, k_cache, v_cache, torch.arange(7))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float32], ids=str)
def test_rows_go_into_8_bits_by_their_scales(dtype: torch.dtype, element: torch.dtype) -> None:
    k, v, _, _ = made()
    k, v = (100 * x.to(element) for x in (k, v))
    k[2, 1, 3] = torch.nan
    k_cache, v_cache = (torch.zeros(7, PAGE, H, size, dtype=torch.uint8).view(dtype) for size in (D, Dv))
    scales = torch.tensor(0.002), torch.tensor([0.3, 1e-4, 2.0])
    slots = [9, -1, 0, 27, 13]
    store(k, v, k_cache, v_cache, torch.tensor(slots), scales)
    for x, cache, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
        wanted = (x.float() / scale.reshape(-1, 1)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
        for slot, row in enumerate(cache.flatten(0, 1)):
            expected = wanted[slots.index(slot)] if slot in slots else torch.zeros_like(row)
            assert torch.equal(row.float().nan_to_num(-1), expected.float().nan_to_num(-1))


def test_scales_that_do_not_fit_are_named() -> None:
    k, v, _, _ = made()
    k_cache, v_cache = (torch.zeros(7, PAGE, H, size).to(torch.float8_e5m2) for size in (D, Dv))
    slots, one = torch.arange(6), torch.ones(())
    with pytest.raises(
        TypeError, match=r"scales: expected those of k and v, for a cache of torch\.float8_e5m2"
    ):
        store(k, v, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"scales: expected f32 of one element or \[3\] for v, got .* \[2\]"):
        store(k, v, k_cache, v_cache, slots, (one, torch.ones(2)))
    with pytest.raises(ValueError, match=r"scales: expected f32 .* for k, got torch\.float64"):
        store(k, v, k_cache, v_cache, slots, (one.double(), one))
    with pytest.raises(ValueError, match=r"scales: expected f32 .* \[3\] for v, got torch\.float32 \[1, 3\]"):
        store(k, v, k_cache, v_cache, slots, (one, torch.ones(1, 3)))  # of stride 3 along its first axis
    with pytest.raises(ValueError, match="scales: expected device cpu, of the cache, for k, got meta"):
        store(k, v, k_cache, v_cache, slots, (one.to("meta"), one))


def test_caches_are_quantised_alike() -> None:
    k, v, k_cache, v_cache = made()
    scales = torch.ones(()), torch.full((), 0.5)
    said = r"v: expected a cache of torch\.float8_e5m2, as of k, got torch\.float32"
    with pytest.raises(TypeError, match=said):
        store(k, v, k_cache.to(torch.float8_e5m2), v_cache, torch.arange(6), scales)
