"""Padded batches and packed sequences, as flash-attention's functions between them have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.compat.bert_padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences
from attnc.compat.flash_attn import flash_attn_varlen_qkvpacked_func
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

KEPT = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64])
def test_a_padded_batch_goes_and_comes(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2, 3, requires_grad=True)
    rows, indices, ends, longest, counted = unpad_input(x, KEPT.to(dtype))
    assert torch.equal(rows, x[KEPT.bool()])
    assert (ends.tolist(), ends.dtype, longest) == ([0, 4, 6, 6], torch.int32, 4)
    assert counted.tolist() == [4, 2, 0]
    padded = pad_input(rows, indices.to(torch.int32 if dtype is torch.int8 else torch.int64), 3, 5)
    kept = KEPT[..., None, None].float()
    assert torch.equal(padded, x * kept)
    (found,) = torch.autograd.grad(padded.square().sum(), x)
    assert torch.equal(found, 2 * x * kept)


def test_rows_that_do_not_count_are_kept() -> None:
    x = torch.randn(3, 5)
    rows, _, ends, longest, counted = unpad_input(x, KEPT, 1 - KEPT)
    assert torch.equal(rows, x.flatten())
    assert (ends.tolist(), longest, counted.tolist()) == ([0, 5, 10, 15], 5, [4, 2, 0])
    some = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
    for dtype in (torch.bool, torch.int8, torch.int64):
        rows, _, ends, longest, counted = unpad_input(x, KEPT, some.to(dtype))
        assert torch.equal(rows, x[(KEPT + some).bool()])
        assert (ends.tolist(), longest, counted.tolist()) == ([0, 5, 9, 9], 5, [4, 2, 0])
    with pytest.raises(
        ValueError, match=r"hidden_states: expected shape \[3, 5\] and more axes, got \[5, 3\]"
    ):
        unpad_input(x.T, KEPT)
    with pytest.raises(ValueError, match=r"unused_mask: expected shape \[3, 5\], got \[3, 4\]"):
        unpad_input(x, KEPT, KEPT[:, :4])


def test_rows_may_hold_several_sequences() -> None:
    x = torch.randn(2, 5, 4)
    rows, indices, ends, longest = unpad_input_for_concatenated_sequences(
        x, torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0]])
    )
    assert torch.equal(rows, torch.cat([x[0, :3], x[1]]))
    assert (indices.tolist(), ends.tolist(), longest) == ([0, 1, 2, 5, 6, 7, 8, 9], [0, 2, 3, 8], 5)


def test_attention_to_a_padded_batch() -> None:
    """As programs write it around the packed function."""
    x = torch.randn(3, 5, 3, 2, 16)
    rows, indices, ends, longest, _ = unpad_input(x, KEPT)
    o = pad_input(flash_attn_varlen_qkvpacked_func(rows, ends, longest, causal=True), indices, 3, 5)
    for b in range(3):
        q, k, v = (y.transpose(0, 1) for y in x[b, KEPT[b].bool()].unbind(1))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(o[b, KEPT[b].bool()], expected.transpose(0, 1))
    assert not o[KEPT == 0].any()


def test_what_is_no_batch_is_refused_by_name() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="hidden_states: expected a tensor, got NoneType"):
        unpad_input(nothing, KEPT)
    with pytest.raises(ValueError, match=r"hidden_states: expected shape \[3, 5\]"):
        unpad_input(torch.ones(3, 4, 2), KEPT)
