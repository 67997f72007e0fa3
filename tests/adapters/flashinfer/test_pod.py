"""Prefill and decoding in one call, against float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, SIZES, compare, csr, stored, workspace
from tests.adapters.oracle import attend, pages


def queries(count: int) -> torch.Tensor:
    return torch.randn(count, HEADS * GROUP, SIZE)


def test_a_prompt_and_decoded_tokens() -> None:
    lengths = [9, 4, 17]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    wrapper: Any = PODWithPagedKVCacheWrapper(workspace(), "HND")
    assert not wrapper.is_cuda_graph_enabled
    wrapper.plan(*csr(lengths, table), head_dim=SIZE, window_left=6, **SIZES)
    q, prompt, new = queries(3), queries(7), torch.randn(2, 11, HEADS, SIZE)
    o, decoded = wrapper.run(
        prompt, *new, q, stored(k, v, "HND-together"), causal_p=True, sm_scale_p=0.3, v_scale=2.0,
        window_left_d=6, sm_scale_d=SIZE**-0.5, return_lse_p=True,
    )  # fmt: skip
    compare(o, None, attend(prompt, *new, scale=0.3))
    for b in range(3):
        wanted, lse = attend(q[b : b + 1], keys[b], values[b], scale=SIZE**-0.5, left=6)
        compare(decoded[b : b + 1] / 2, None, (wanted, lse))
    mask = torch.rand(7, 11) < 0.7
    o, _ = wrapper.run(prompt, *new.transpose(1, 2), q, stored(k, v, "HND-apart"), mask, kv_layout_p="HND")
    compare(o, None, attend(prompt, *new, scale=SIZE**-0.5, seen=mask))


def test_a_graph_decodes_what_is_planned_later() -> None:
    k, v, table, keys, values = pages([9, 17], PAGE, HEADS, SIZE)
    buffers = torch.empty(3), torch.empty(12), torch.empty(2)
    wrapper: Any = PODWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*csr([1, 2], table), head_dim=SIZE, **SIZES)
    kept = wrapper._decode._plan_of_run().tables["kv_len"]
    wrapper.plan(*csr([9, 17], table), head_dim=SIZE, **SIZES)
    assert kept.tolist() == [9, 17]
    q = queries(2)
    _, decoded = wrapper.run(queries(1), *torch.randn(2, 5, HEADS, SIZE), q, (k, v))
    for b in range(2):
        compare(decoded[b : b + 1], None, attend(q[b : b + 1], keys[b], values[b], scale=SIZE**-0.5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"custom_mask_d": torch.ones(3, 9)}, "run: custom_mask_d: expected None"),
        ({"rope_theta_d": 1e4}, "run: rope_theta_d: expected None"),
        ({"sm_scale_d": 0.5}, "run: sm_scale_d: expected 0.25, as planned, got 0.5"),
        ({"window_left_d": 5}, "run: window_left_d: expected -1, as planned, got 5"),
        (
            {"pos_encoding_mode_d": "ALIBI"},
            "run: pos_encoding_mode_d: expected 'NONE', as planned, got 'ALIBI'",
        ),
    ],
)
def test_what_the_plan_says_is_not_said_otherwise(change: dict[str, Any], said: str) -> None:
    k, v, table, *_ = pages([9], PAGE, HEADS, SIZE)
    wrapper: Any = PODWithPagedKVCacheWrapper(workspace())
    given = (queries(2), *torch.randn(2, 4, HEADS, SIZE), queries(1), (k, v))
    with pytest.raises(RuntimeError, match=r"run: expected a call of plan\(\) before"):
        wrapper.run(*given)
    wrapper.plan(*csr([9], table), head_dim=SIZE, **SIZES)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        wrapper.run(*given, **change)


def test_two_batches() -> None:
    lengths, counts = [9, 6, 17], [9, 0, 3]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    tables = csr(lengths, table)
    wrapper: Any = BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(
        torch.tensor([0, 9, 9, 12]), *tables, torch.arange(4), *tables, head_dim=SIZE, window_left=6, **SIZES
    )
    q, decoded = queries(12), queries(3)
    for causal in (True, False):
        (o, o_d), (lse, lse_d) = wrapper.run(q, (k, v), decoded, (k, v), causal_p=causal, return_lse=True)
        parts = zip(*(torch.split(x, counts) for x in (q, o, lse)), keys, values, strict=True)
        for rows, part, of_rows, *own in parts:
            compare(part, of_rows, attend(rows, *own, scale=SIZE**-0.5, left=6, causal=causal))
        for b in range(3):
            one = slice(b, b + 1)
            wanted = attend(decoded[one], keys[b], values[b], scale=SIZE**-0.5, left=6, causal=False)
            compare(o_d[one], lse_d[one], wanted)
    plain, scaled = (wrapper.run(q, (k, v), decoded, (k, v), k_scale=scale) for scale in (None, 0.5))
    assert torch.equal(plain[0], scaled[0])  # scales are of decoding
    assert not torch.equal(plain[1], scaled[1])
    with pytest.raises(ValueError, match="run: custom_mask_p: expected None"):
        wrapper.run(q, (k, v), decoded, (k, v), custom_mask_p=torch.ones(9, 9))


@pytest.mark.parametrize(
    ("at", "given", "said"),
    [
        (3, torch.tensor([1, 5]), "last_page_len_p: expected 1 .. 4, got 5"),
        (7, torch.tensor([[1]]), "plan: last_page_len_d: expected shape [B], got [1, 1]"),
        (4, torch.tensor([0, 2, 1]), "plan: qo_indptr_d: expected numbers that ascend from 0, got [0, 2, 1]"),
        (1, torch.tensor([0, 1]), "plan: kv_indptr_p: expected shape [3], got [2]"),
        (6, torch.tensor([0]), "kv_indices_d: expected at least 2 numbers, got 1"),
    ],
)
def test_tables_of_two_batches_are_named(at: int, given: torch.Tensor, said: str) -> None:
    one = [torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([1, 2])]
    tables = [*one, *one]
    tables[at] = given
    wrapper: Any = BatchPODWithPagedKVCacheWrapper(workspace())
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        wrapper.plan(*tables, head_dim=SIZE, **SIZES)
