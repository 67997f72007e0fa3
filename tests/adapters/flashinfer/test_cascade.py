"""States that are merged, and levels of pages, against attention over all keys at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnc.adapters import flashinfer
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, compare, csr, stored, workspace
from tests.adapters.oracle import attend, pages

fi: Any = flashinfer  # what a program without types calls

Q_HEADS = HEADS * GROUP
SIZES: Any = (Q_HEADS, HEADS, SIZE, PAGE)


def states(count: int, rows: int = 5) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """States of so many parts of the keys, the second of which has none, and what all keys give."""
    torch.manual_seed(count)
    lengths = [7, 0, 3, 5][:count]
    q = torch.randn(rows, Q_HEADS, SIZE)
    k, v = (torch.randn(sum(lengths), HEADS, SIZE) for _ in range(2))
    parts = zip(torch.split(k, lengths), torch.split(v, lengths), strict=True)
    found = [attend(q, key, value, scale=0.3, causal=False) for key, value in parts]
    right = attend(q, k, v, scale=0.3, causal=False)
    return [o.float() for o, _ in found], [(lse / math.log(2)).float() for _, lse in found], right


def test_two_states() -> None:
    (a, b), (s_a, s_b), right = states(2)
    o, lse = fi.merge_state(a, s_a, b, s_b)
    compare(o, lse, right)
    o, lse = fi.merge_state(b.fill_(torch.nan), s_b, a, s_a)  # nothing of a state without keys is read
    compare(o, lse, right)
    v, s = fi.merge_state(b, s_b, b, s_b)
    assert v.eq(0).all()
    assert s.isneginf().all()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_many_states(count: int) -> None:
    v, s, right = states(count)
    if count > 1:
        v[1].fill_(torch.nan)
    o, lse = fi.merge_states(torch.stack(v, 1), torch.stack(s, 1))
    compare(o, lse, right)


def test_states_are_merged_where_a_mask_says_so() -> None:
    (a, _, b), (s_a, _, s_b), _ = states(3)
    v, s = a.clone(), s_a.clone()
    mask = torch.tensor([True, False, True, False, False])
    fi.merge_state_in_place(v, s, b, s_b, mask)
    merged = fi.merge_state(a, s_a, b, s_b)
    for kept in range(5):
        expected = merged if mask[kept] else (a, s_a)
        assert torch.equal(v[kept], expected[0][kept])
        assert torch.equal(s[kept], expected[1][kept])
    fi.merge_state_in_place(a, s_a, b, s_b)
    assert torch.equal(a, merged[0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"s_a": torch.zeros(5)}, r"s_a: expected shape \[5, 4\], got \[5\]"),
        ({"s_b": torch.zeros(5, 3)}, r"s_b: expected shape \[5, 4\], got \[5, 3\]"),
        (
            {"v_b": torch.zeros(5, 4, 8)},
            r"v_b: expected shape \[5, 4, 16\], got \[5, 4, 8\]",
        ),
        (
            {"v_b": torch.zeros(5, 4, 16).half()},
            "v_b: expected dtype torch.float32, like v_a, got torch.float16",
        ),
    ],
)
def test_states_that_do_not_fit(changed: Any, said: str) -> None:
    (a, b), (s_a, s_b), _ = states(2)
    with pytest.raises((TypeError, ValueError), match=said):
        fi.merge_state(**{"v_a": a, "s_a": s_a, "v_b": b, "s_b": s_b} | changed)
    with pytest.raises(ValueError, match=r"v: expected shape \[T, n, H, D\]"):
        fi.merge_states(a, s_a)
    with pytest.raises(ValueError, match=r"mask: expected shape \[5\], got \[4\]"):
        fi.merge_state_in_place(a, s_a, b, s_b, torch.ones(4).bool())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["NHD-apart", "HND-together"])
@pytest.mark.parametrize("rows", [[1, 1, 1], [2, 0, 5]], ids=str)
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("graph", [False, True])
def test_levels(form: str, rows: list[int], levels: int, graph: bool) -> None:
    """All requests share 9 keys, the last two share 6 more, and each has some of its own."""
    lengths = [9, 6, 5, 8, 7]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    total = sum(rows)
    starts = [[0, total], [0, rows[0], total], [0, rows[0], rows[0] + rows[1], total]][3 - levels :]
    parts: list[list[int]] = [[0], [-1, 1], [2, 3, 4]]
    parts = parts[3 - levels :]
    tables: list[Any] = []
    for numbers in parts:
        some = [lengths[number] if number >= 0 else 0 for number in numbers]
        tables.append(csr(some, table[[max(number, 0) for number in numbers]]))
    buffers: list[Any] = []
    if graph:
        counts = [len(numbers) for numbers in parts]
        sizes = [[n + 1 for n in counts], [n + 1 for n in counts], [12] * levels, counts]
        buffers = [[torch.empty(size) for size in of_level] for of_level in sizes]
    wrapper = fi.MultiLevelCascadeAttentionWrapper(levels, workspace(), form[:3], graph, *buffers)
    indptrs = [torch.tensor(start, dtype=torch.int32) for start in starts]
    csrs: list[Any] = [list(of_all) for of_all in zip(*tables, strict=True)]
    for _ in range(1 + graph):
        wrapper.plan(indptrs, *csrs, *SIZES, causal=True, q_data_type="float32")
    q = torch.randn(total, Q_HEADS, SIZE)
    o = wrapper.run(q, stored(k, v, form))
    first = 0
    for request, count in enumerate(rows):
        shared = [[0], [1] if request else []][3 - levels :]
        numbers = [*(number for level in shared for number in level), 2 + request]
        expected = attend(
            q[first : first + count],
            torch.cat([keys[number] for number in numbers]),
            torch.cat([values[number] for number in numbers]),
            scale=SIZE**-0.5,
        )
        compare(o[first : first + count], None, expected)
        first += count


def test_levels_are_as_many_as_were_said() -> None:
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, workspace())
    one = [torch.zeros(2, dtype=torch.int32)]
    with pytest.raises(ValueError, match="qo_indptr_arr: expected a tensor for each of 2 levels, got 1"):
        wrapper.plan(one, one, one, one, *SIZES)
    two = one * 2
    with pytest.raises(ValueError, match=r"window_left: expected -1 with several levels, .* got 8"):
        wrapper.plan(two, two, two, two, *SIZES, window_left=8)
    with pytest.raises(ValueError, match="pos_encoding_mode: expected 'NONE' with several levels"):
        wrapper.plan(two, two, two, two, *SIZES, pos_encoding_mode="ALIBI")
    with pytest.raises(ValueError, match="qo_indptr_buf: expected a tensor, as use_cuda_graph is set"):
        fi.MultiLevelCascadeAttentionWrapper(2, workspace(), use_cuda_graph=True)
    with pytest.raises(ValueError, match="num_levels: expected at least 1, got 0"):
        fi.MultiLevelCascadeAttentionWrapper(0, workspace())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_prefix_that_is_an_ordinary_tensor(layout: str) -> None:
    lengths, rows = [9, 0, 6], [2, 1, 4]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    k_shared, v_shared = (torch.randn(11, HEADS, SIZE) for _ in range(2))
    given: Any = [x if layout == "NHD" else x.transpose(0, 1).contiguous() for x in (k_shared, v_shared)]
    pools = stored(k, v, f"{layout}-apart")
    decode = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(), layout)
    decode.begin_forward(*csr(lengths, table), *SIZES, data_type="float32")
    prefill = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(), layout)
    with pytest.raises(RuntimeError, match=r"expected a call of begin_forward\(\) before"):
        prefill.forward(torch.zeros(7, Q_HEADS, SIZE), *given, pools)
    starts = torch.tensor([0, 2, 3, 7], dtype=torch.int32)
    prefill.begin_forward(starts, *csr(lengths, table), *SIZES)
    for counts, causal, scale in (([1, 1, 1], None, None), (rows, True, None), (rows, False, 0.4)):
        q = torch.randn(sum(counts), Q_HEADS, SIZE)
        if causal is None:
            o = decode.forward(q, *given, pools)
        else:
            o = prefill.forward(q, *given, pools, causal=causal, sm_scale=scale)
        for b, (part, found) in enumerate(zip(torch.split(q, counts), torch.split(o, counts), strict=True)):
            seen = torch.ones(len(part), 11 + lengths[b], dtype=torch.bool)
            if causal:
                seen[:, 11:] = seen[:, 11:].tril(lengths[b] - len(part))
            expected = attend(
                part,
                torch.cat((k_shared, keys[b])),
                torch.cat((v_shared, values[b])),
                scale=scale or SIZE**-0.5,
                seen=seen,
            )
            compare(found, None, expected)


def test_a_prefix_takes_the_tables_that_came_last() -> None:
    """Calls of one form after each other: with other tables they are those of a wrapper of their own."""
    k, v, table, *_ = pages([9, 6], PAGE, HEADS, SIZE)
    shared = [torch.randn(5, HEADS, SIZE) for _ in range(2)]
    q, starts = torch.randn(3, Q_HEADS, SIZE), torch.tensor([0, 1, 3], dtype=torch.int32)
    kept = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())
    found = []
    for lengths, rows in (([9, 6], table), ([4, 6], table), ([6, 9], table.flip(0))):
        alone = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())
        results = []
        for wrapper in (kept, alone):
            wrapper.begin_forward(starts, *csr(lengths, rows), *SIZES)
            results += [wrapper.forward(q, *shared, (k, v), causal=True) for _ in range(2)]
        assert all(torch.equal(o, results[-1]) for o in results)
        found.append(results[0])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_states_that_saw_nothing_are_joined_to_nothing() -> None:
    """Beside others, alone, and none at all; what stands in v there may be no number."""
    v, s = torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1)
    v[1, 0], s[1, 0] = torch.nan, -torch.inf
    v[2], s[2] = torch.nan, -torch.inf
    found, sums = fi.merge_states(v, s)
    share = torch.softmax(s[0] * math.log(2), 0)[..., None]
    torch.testing.assert_close(found[0], (v[0] * share).sum(0))
    torch.testing.assert_close(sums[0], torch.logsumexp(s[0] * math.log(2), 0) / math.log(2))
    torch.testing.assert_close(found[1], v[1, 1])
    torch.testing.assert_close(sums[1], s[1, 1])
    assert not found[2].any()
    assert sums[2].isneginf().all()
    nothing, sums = fi.merge_states(v[:, :0], s[:, :0])
    assert not nothing.any()
    assert sums.isneginf().all()
    assert fi.MultiLevelCascadeAttentionWrapper(2, workspace()).is_cuda_graph_enabled is False
