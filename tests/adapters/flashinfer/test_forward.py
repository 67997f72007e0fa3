"""FlashInfer's older interface, which says at each call what a plan says: `forward`, `fast_decode_plan`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fast_decode_plan,
)
from tests.adapters.flashinfer.batches import GROUP, HEADS, SIZE, SIZES, csr, workspace
from tests.adapters.oracle import pages

LENGTHS, COUNTS = [9, 6, 17], [9, 0, 3]
STARTS, ENDS = torch.tensor([0, 9, 9, 12]), torch.tensor([0, 9, 15, 32])
SAID: dict[str, Any] = {"window_left": 4, "logits_soft_cap": 2.0, "sm_scale": 0.3}


def planned(kind: str, **options: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A wrapper with a plan, and the tensors of its calls."""
    k, v, table, keys, values = pages(LENGTHS, 4, HEADS, SIZE)
    torch.manual_seed(1)
    q = torch.randn(12, HEADS * GROUP, SIZE)
    if kind == "decode":
        decode = BatchDecodeWithPagedKVCacheWrapper(workspace())
        decode.plan(*csr(LENGTHS, table), head_dim=SIZE, **SIZES | options)
        return decode, (q[:3], (k, v))  # type: ignore[return-value]  # a pair of pools is one argument
    if kind == "prefill":
        prefill = BatchPrefillWithPagedKVCacheWrapper(workspace())
        prefill.plan(STARTS, *csr(LENGTHS, table), head_dim_qk=SIZE, **SIZES | options)
        return prefill, (q, (k, v))  # type: ignore[return-value]  # as above
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    sizes = {name: x for name, x in SIZES.items() if name != "page_size"}
    ragged.plan(STARTS, ENDS, head_dim_qk=SIZE, **sizes | options)
    return ragged, (q, torch.cat(keys), torch.cat(values))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_forward_stands_in_the_place_of_the_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the calls of `run` behind it, too. Layers that differ in turn make nothing again."""
    causal = {} if kind == "decode" else {"causal": True}
    told, tensors = planned(kind, **SAID, **causal)
    right = told.run(*tensors, return_lse=True)
    plain, _ = planned(kind)
    first = plain.run(*tensors)
    for again in range(2):
        for found, wanted in zip(plain.forward_return_lse(*tensors, **SAID, **causal), right, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        torch.testing.assert_close(plain.run(*tensors), right[0], rtol=0, atol=0)
        torch.testing.assert_close(plain.forward(*tensors), first, rtol=0, atol=0)
        if not again:
            monkeypatch.delattr("attnc.adapters.flashinfer.wrapper.kernel_name")
    with pytest.raises(ValueError, match="forward: pos_encoding_mode: expected 'NONE', as planned, got 'AL"):
        plain.forward(*tensors, pos_encoding_mode="ALIBI")


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_a_call_that_is_refused_leaves_the_plan(kind: str) -> None:
    wrapper, (q, *cache) = planned(kind)
    before = wrapper._planned
    with pytest.raises(ValueError, match="q: expected"):
        wrapper.forward(q[:, 1:], *cache, **SAID)
    assert wrapper._planned is before


def test_wrappers_of_other_calls_have_no_forward_that_changes_them() -> None:
    """What sinks and ranges add to `run` an older call cannot say."""
    k, v, table, *_ = pages(LENGTHS, 4, HEADS, SIZE)
    sizes: dict[str, Any] = {"head_dim_qk": SIZE, "head_dim_vo": SIZE}
    types: dict[str, Any] = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    ranges = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), **sizes, **types)
    sinks = BatchAttentionWithAttentionSinkWrapper(workspace())
    q, before = torch.randn(12, HEADS * GROUP, SIZE), None
    for wrapper in (ranges, sinks):
        wrapper.plan(STARTS, *csr(LENGTHS, table), head_dim_qk=SIZE, **SIZES)
        before = wrapper._planned
        with pytest.raises(TypeError, match=r"sinks|bidirectional_ranges"):
            wrapper.forward(q, (k, v), **SAID)
        assert wrapper._planned is before
    with pytest.raises(ValueError, match="q: expected"):
        sinks.run(q[:, 1:], (k, v), torch.zeros(HEADS * GROUP), 0.3)
    assert sinks._planned is before


def test_a_plan_in_the_place_of_the_wrappers() -> None:
    right, tensors = planned("decode", **SAID)
    wrapper, _ = planned("decode")
    _, _, table, *_ = pages(LENGTHS, 4, HEADS, SIZE)
    indptr, indices, last = csr(LENGTHS, table)
    wrapper.plan = partial(fast_decode_plan, wrapper)
    sizes = {name: x for name, x in SIZES.items() if name != "q_data_type"}
    wrapper.plan(
        torch.full_like(indptr, 7),
        *(indices, last),
        head_dim=SIZE,
        data_type=torch.float32,
        global_override_indptr_cpu=indptr,
        **sizes | SAID,
    )
    torch.testing.assert_close(wrapper.run(*tensors), right.run(*tensors), rtol=0, atol=0)
