"""Mixed batches, and sinks that `run` is given behind the pages, against float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithAttentionSinkWrapper,
)
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, SIZES, compare, csr, stored, workspace
from tests.adapters.oracle import attend, pages

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def queries(count: int) -> torch.Tensor:
    return torch.randn(count, HEADS * GROUP, SIZE)


def with_spare_pages(
    lengths: list[int], table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr, indices, lengths) of requests that have a page more than they use."""
    counts = [-(-length // PAGE) for length in lengths]
    rows = [torch.cat([row[:count], row[:1]]) for row, count in zip(table, counts, strict=True)]
    indptr = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0)
    return indptr.int(), torch.cat(rows), torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("form", "spare", "options"),
    [
        ("NHD-apart", False, {"causal": True}),
        ("HND-together", True, {"causal": True, "logits_soft_cap": 3.0, "sm_scale": 0.4}),
        ("NHD-together", True, {}),
    ],
)
def test_mixed_batches(form: str, spare: bool, options: dict[str, Any]) -> None:
    """A prompt, a request without queries, a decoded token."""
    lengths, counts = [9, 4, 17], [9, 0, 1]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    indptr, indices, used = with_spare_pages(lengths, table)
    if not spare:
        indptr, indices, _ = csr(lengths, table)
    wrapper: Any = BatchAttention(form[:3])
    sizes = SIZES | {"kv_data_type": torch.float32, "head_dim_qk": SIZE, "head_dim_vo": SIZE}
    wrapper.plan(torch.tensor([0, 9, 9, 10]), indptr, indices, used, **sizes, **options)
    q, pools, softcap = queries(10), stored(k, v, form), options.get("logits_soft_cap", 0.0)
    out, kept = torch.empty_like(q), torch.empty(10, HEADS * GROUP)
    found, lse = wrapper.run(q, pools, out, kept, logits_soft_cap=softcap)
    assert found is out
    assert lse is kept
    scale, causal = options.get("sm_scale", SIZE**-0.5), options.get("causal", False)
    parts = zip(*(torch.split(x, counts) for x in (q, out, lse)), keys, values, strict=True)
    for rows, o, of_rows, *own in parts:
        compare(o, of_rows, attend(rows, *own, scale=scale, softcap=softcap, causal=causal))
    found, _ = wrapper.run(q, pools, k_scale=torch.tensor(0.5), v_scale=2.0)
    halved = attend(q[:9], keys[0], values[0], scale=scale / 2, softcap=softcap, causal=causal)
    compare(found[:9] / 2, None, halved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_len_arr": torch.tensor([9, 21])}, "plan: kv_len_arr: expected 0 .. 20 for request 1, got 21"),
        ({"kv_len_arr": torch.tensor([9.0, 2.0])}, "plan: kv_len_arr: expected dtype torch.int32"),
        ({"kv_indices": torch.tensor([0])}, "plan: kv_indices: expected at least 8 numbers, got 1"),
        ({"kv_indptr": torch.tensor([0, 3])}, "plan: kv_indptr: expected shape [3], got [2]"),
        ({"page_size": 0}, "plan: page_size: expected at least 1, got 0"),
        ({"use_profiler": True}, "plan: use_profiler: expected None"),
        ({"q_data_type": "int8"}, "plan: q_data_type: expected dtype torch.float16"),
    ],
)
def test_tables_that_do_not_fit_are_named(change: dict[str, Any], said: str) -> None:
    planned = SIZES | {
        "qo_indptr": torch.tensor([0, 9, 10]),
        "kv_indptr": torch.tensor([0, 3, 8]),
        "kv_indices": torch.arange(8),
        "kv_len_arr": torch.tensor([9, 17]),
        "head_dim_qk": SIZE,
        "head_dim_vo": SIZE,
    }
    wrapper: Any = BatchAttention()
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(said)}"):
        wrapper.plan(**planned | change)
    with pytest.raises(RuntimeError, match=r"run: expected a call of plan\(\) before"):
        wrapper.run(queries(10), torch.zeros(8, 2, PAGE, HEADS, SIZE))


def test_a_softcap_is_the_plans() -> None:
    k, v, table, *_ = pages([5], PAGE, HEADS, SIZE)
    wrapper: Any = BatchAttention()
    wrapper.prewarm_paged_kv_stride_variant()
    sizes = SIZES | {"kv_data_type": torch.float32, "head_dim_qk": SIZE, "head_dim_vo": SIZE}
    wrapper.plan(torch.tensor([0, 1]), *csr([5], table)[:2], torch.tensor([5]), **sizes)
    with pytest.raises(ValueError, match=r"run: logits_soft_cap: expected 0\.0, as planned, got 30\.0"):
        wrapper.run(queries(1), (k, v), logits_soft_cap=30.0)
    with pytest.raises(ValueError, match="run: kv_cache_sf: expected None"):
        wrapper.run(queries(1), (k, v), kv_cache_sf=(k, v))
    capped = {"logits_soft_cap": 3.0}
    wrapper.plan(torch.tensor([0, 1]), *csr([5], table)[:2], torch.tensor([5]), **sizes, **capped)
    q = queries(1)
    for given in ({}, capped, {"logits_soft_cap": 0.0}):  # none, and 0, are that of the plan
        assert torch.equal(wrapper.run(q, (k, v), **given)[0], wrapper.run(q, (k, v), **capped)[0])
    with pytest.raises(ValueError, match=r"run: logits_soft_cap: expected 3\.0, as planned, got 2\.0"):
        wrapper.run(q, (k, v), logits_soft_cap=2.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window_left", [-1, 3])
def test_sinks_of_prompts(window_left: int) -> None:
    """Under fixed buffers too: a later plan serves the graph of the first."""
    lengths, counts = [9, 6, 17], [9, 0, 3]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    buffers = torch.empty(4), torch.empty(4), torch.empty(12), torch.empty(3)
    wrapper: Any = BatchAttentionWithAttentionSinkWrapper(
        workspace(),
        "NHD",
        True,
        *buffers,
        q_data_type=torch.float32,
        head_dim_qk=SIZE,
        window_left=window_left,
    )
    sizes = SIZES | {"head_dim_qk": SIZE, "causal": True, "window_left": window_left}
    wrapper.plan(torch.tensor([0, 1, 5, 12]), *csr(lengths, table), **sizes)
    q = queries(12)
    wrapper.run(q, (k, v), SINKS, 0.3)
    wrapper.plan(torch.tensor([0, 9, 9, 12]), *csr(lengths, table), **sizes)
    o, lse = wrapper.run(q, (k, v), SINKS, 0.3, return_lse=True)
    parts = zip(*(torch.split(x, counts) for x in (q, o, lse)), keys, values, strict=True)
    for rows, part, of_rows, *own in parts:
        compare(part, of_rows, attend(rows, *own, scale=0.3, left=window_left, sinks=SINKS))


def test_sinks_of_decoded_tokens() -> None:
    lengths = [9, 0, 17]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    wrapper: Any = BatchDecodeWithAttentionSinkWrapper(workspace(), "HND")
    wrapper.plan(*csr(lengths, table), head_dim=SIZE, sm_scale=0.3, **SIZES)
    q = queries(3)
    o, lse = wrapper.run_return_lse(q, stored(k, v, "HND-apart"), SINKS, SIZE**-0.5)
    of_plan = wrapper.run(q, stored(k, v, "HND-apart"), sinks=SINKS)
    for b in range(3):
        compare(of_plan[b : b + 1], None, attend(q[b : b + 1], keys[b], values[b], scale=0.3, sinks=SINKS))
        wanted = attend(q[b : b + 1], keys[b], values[b], scale=SIZE**-0.5, sinks=SINKS)
        compare(o[b : b + 1], lse[b : b + 1], wanted)
    with pytest.raises(TypeError, match="run: sinks: expected a tensor, got None"):
        wrapper.run(q, stored(k, v, "HND-apart"))
    with pytest.raises(TypeError, match=r"run: sinks: expected dtype torch\.float32, got torch\.float16"):
        wrapper.run(q, stored(k, v, "HND-apart"), SINKS.half())


def test_positions_are_not_encoded_beside_sinks() -> None:
    said = "BatchAttentionWithAttentionSinkWrapper: pos_encoding_mode: expected 'NONE', got 'ALIBI'"
    with pytest.raises(ValueError, match=said):
        BatchAttentionWithAttentionSinkWrapper(workspace(), pos_encoding_mode="ALIBI")
