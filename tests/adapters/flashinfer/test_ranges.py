"""Prompts with ranges that see each other in both directions, against float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import BatchPrefillWithCausalBidirectionalRangesWrapper
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, compare, csr, stored, workspace
from tests.adapters.oracle import attend, pages

MADE: dict[str, Any] = {
    "q_data_type": torch.float32, "kv_data_type": torch.float32, "head_dim_qk": SIZE, "head_dim_vo": SIZE,
}  # fmt: skip
PLANNED: dict[str, Any] = {
    "num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim_qk": SIZE, "page_size": PAGE,
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("left", "reach"), [(2, 4), (3, 0), (-1, -1)])
def test_ranges(left: int, reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt, of none and of a chunk, and a plan after another as a graph sees it."""
    lengths, counts = [9, 6, 17], [9, 0, 3]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    buffers = (torch.empty(4), torch.empty(4), torch.empty(12), torch.empty(3))
    graph = reach > 0
    wrapper: Any = BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(), "HND", graph, *(buffers if graph else [None] * 4), **MADE
    )
    wrapper.plan(torch.tensor([0, 9, 9, 12]), *csr(lengths, table), sm_scale=0.3, **PLANNED)
    q = torch.randn(12, HEADS * GROUP, SIZE)
    ranges = torch.full((12, 2), -1, dtype=torch.int32)
    ranges[2:7] = torch.tensor([2, 6])
    ranges[10:] = torch.tensor([4, 16])
    out, kept = torch.empty_like(q), torch.empty(12, HEADS * GROUP)
    found, lse = wrapper.run(
        q, stored(k, v, "HND-together"), ranges, left, reach, out=out, lse=kept, return_lse=True
    )
    assert found is out
    assert lse is kept
    parts = zip(*(torch.split(x, counts) for x in (q, out, lse, ranges)), keys, values, strict=True)
    for rows, o, of_rows, own, *known in parts:
        at = torch.arange(len(known[0]))
        back = (torch.arange(len(rows)) + len(at) - len(rows))[:, None] - at
        causal = (back >= 0) & ((back <= left) if left >= 0 else torch.tensor(True))
        ranged = (
            (own[:, :1] <= at) & (at <= own[:, 1:]) & ((back < reach) if reach > 0 else torch.tensor(True))
        )
        compare(o, of_rows, attend(rows, *known, scale=0.3, seen=causal | ranged))
    first = out.clone()
    monkeypatch.delattr("attnc.adapters.flashinfer.ranges.kernel_name")  # nothing is made again
    wrapper.run(q.mul_(2), stored(k, v, "HND-together"), ranges, left, reach, out=out)
    assert not torch.equal(out, first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"causal": True}, "plan: causal: expected None"),
        ({"logits_soft_cap": 3.0}, "plan: logits_soft_cap: expected None"),
        ({"window_left": 4}, "plan: window_left: expected -1, as the wrapper was made, got 4"),
        ({"head_dim_qk": 32}, "plan: head_dim_qk: expected 16, as the wrapper was made, got 32"),
        (
            {"q_data_type": "float16"},
            "plan: q_data_type: expected torch.float32, as the wrapper was made, got",
        ),
        ({"prefix_len_ptr": torch.ones(1)}, "plan: prefix_len_ptr: expected None"),
    ],
)
def test_what_a_plan_may_not_say(change: dict[str, Any], said: str) -> None:
    wrapper: Any = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), **MADE)
    _, _, table, *_ = pages([5], PAGE, HEADS, SIZE)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        wrapper.plan(torch.tensor([0, 5]), *csr([5], table), **PLANNED | change)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(5, 2), "run: bidirectional_ranges: expected dtype torch.int32, got torch.float32"),
        (torch.zeros(4, 2).int(), "run: bidirectional_ranges: expected shape [5, 2], got [4, 2]"),
        (torch.zeros(2, 5).int().T, "run: bidirectional_ranges: expected a contiguous tensor, got strides"),
    ],
)
def test_ranges_that_do_not_fit_are_named(given: torch.Tensor, said: str) -> None:
    wrapper: Any = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), **MADE)
    k, v, table, *_ = pages([5], PAGE, HEADS, SIZE)
    wrapper.plan(torch.tensor([0, 5]), *csr([5], table), **PLANNED)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(said)}"):
        wrapper.run(torch.zeros(5, HEADS * GROUP, SIZE), (k, v), given)


def test_other_kinds_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="pos_encoding_mode: expected 'NONE', got 'ALIBI'"):
        BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), pos_encoding_mode="ALIBI")
    with pytest.raises(ValueError, match="v_sf_swizzled: expected None"):
        BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), v_sf_swizzled=True)
