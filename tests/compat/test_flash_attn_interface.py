"""flash-attention 3's functions: arguments at its positions, results of its form, parts that are joined."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from attnc.compat import flash_attn
from attnc.compat import flash_attn_interface as three
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("flash_attn_func", {"num_splits": 1}),
        ("flash_attn_qkvpacked_func", {}),
        ("flash_attn_varlen_func", {"num_splits": 1}),
        ("flash_attn_with_kvcache", {"rotary_interleaved": True}),
    ],
)
def test_what_is_left_out_has_the_defaults_of_flash_attn_3(name: str, more: dict[str, Any]) -> None:
    """All others are None, False or 0."""
    parameters = inspect.signature(getattr(three, name)).parameters.values()
    said = {p.name: p.default for p in parameters if p.default is not p.empty and p.default not in (None, 0)}
    assert said == {"window_size": (-1, -1), **more}


def test_positions_are_those_of_flash_attn_3() -> None:
    q, k, v = drawn((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    options: Any = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "softcap": 5.0}
    o, lse = three.flash_attn_func(
        q, k, v, 0.3, True, None, None, None, None, (3, 0), 0, 5.0, return_attn_probs=True
    )
    expected, sums = flash_attn.flash_attn_func(q, k, v, return_lse=True, **options)
    assert torch.equal(o, expected)
    assert torch.equal(lse, sums)
    assert torch.equal(three.flash_attn_func(q, k, v, 0.3, True, None, None, None, None, (3, 0), 0, 5.0), o)

    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    used = torch.tensor([3, 6], dtype=torch.int32)
    q_rows, k_rows, v_rows = (x.flatten(0, 1)[:10] for x in (q, k, v))
    found = three.flash_attn_varlen_func(q_rows, k_rows, v_rows, ends, ends, 6, 6, used, used, 0.3, True)
    options = {"seqused_q": used, "seqused_k": used, "softmax_scale": 0.3, "causal": True}
    expected = flash_attn.flash_attn_varlen_func(q_rows, k_rows, v_rows, ends, ends, **options)
    assert torch.equal(found[4:], expected[4:])

    lengths = torch.tensor([3, 7], dtype=torch.int32)
    found = three.flash_attn_with_kvcache(
        q[:, :1], k, v, None, None, None, None, None, lengths, return_softmax_lse=True
    )
    expected = flash_attn.flash_attn_with_kvcache(
        q[:, :1], k, v, cache_seqlens=lengths, return_softmax_lse=True
    )
    assert all(map(torch.equal, found, expected))


def test_one_tensor_holds_q_k_and_v_with_fewer_heads_too() -> None:
    qkv: Any = drawn((2, 5, 8, 16))[0]
    q, k, v = qkv.split([4, 2, 2], dim=2)
    found = three.flash_attn_qkvpacked_func(qkv, 0.3, True, num_heads_q=4)
    assert torch.equal(found, three.flash_attn_func(q, k, v, 0.3, True))
    whole = qkv[:, :, :6].unflatten(2, (3, 2))
    found = three.flash_attn_qkvpacked_func(whole, 0.3, True)
    q, k, v = whole.unbind(2)
    assert torch.equal(found, three.flash_attn_func(q, k, v, 0.3, True))
    for heads in (None, 3, 8, 0, -2, 10):
        with pytest.raises(ValueError, match="flash_attn_qkvpacked_func: num_heads_q: expected heads of q"):
            three.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)


def test_parts_of_the_keys_are_joined() -> None:
    q, k, v = drawn((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    whole, sums = flash_attn.flash_attn_func(q, k, v, return_lse=True)
    parts = [
        flash_attn.flash_attn_func(q, k[:, at], v[:, at], return_lse=True) for at in (slice(3), slice(3, 7))
    ]
    out = torch.stack([*(o for o, _ in parts), torch.full_like(whole, math.nan)])
    lse = torch.stack([*(sums.mT for _, sums in parts), torch.full_like(sums.mT, -math.inf)])
    o, joined = three.flash_attn_combine(out, lse)
    torch.testing.assert_close(o, whole)
    torch.testing.assert_close(joined, sums.mT)
    into = torch.empty_like(whole, dtype=torch.float16)
    found, _ = three.flash_attn_combine(out, lse, into, torch.float16)
    assert found is into
    torch.testing.assert_close(into, whole.half(), rtol=1e-3, atol=1e-3)
    nothing, joined = three.flash_attn_combine(out[2:], lse[2:])
    assert not nothing.any()
    assert joined.isneginf().all()
    with pytest.raises(ValueError, match="flash_attn_combine: lse_partial: expected shape"):
        three.flash_attn_combine(out, lse.mT)


def test_nothing_is_planned_beforehand() -> None:
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    planned = three.get_scheduler_metadata(2, 1, 7, 4, 2, 16, lengths, num_splits=2)
    q, k, v = drawn((2, 1, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    found = three.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, scheduler_metadata=planned)
    assert torch.equal(found, three.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


def test_arguments_of_flash_attn_3_are_not_taken_for_those_of_2() -> None:
    """There the fourth is the scale and the fifth `causal`; here they would drop and scale."""
    q, k, v = drawn((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    with pytest.raises(TypeError, match="softmax_scale: expected a number, got True: arguments have the pos"):
        flash_attn.flash_attn_func(q, k, v, 0.3, True)
