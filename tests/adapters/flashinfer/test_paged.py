"""The wrappers in FlashInfer's manner against float64: CSR tables, both layouts, lse in base 2."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from attnc.adapters.flashinfer.paged import count_keys, make_tables, split_cache
from attnc.adapters.flashinfer.wrapper import Wrapper, _write_kept
from attnc.api import repeats
from tests.adapters.engines import LARGEST, coded, meant
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, SIZES, compare, csr, stored, workspace
from tests.adapters.oracle import attend, pages

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_left": 6},
    {"logits_soft_cap": 3.0, "sm_scale": 0.4},
    {"logits_soft_cap": -3.0},
    {"disable_split_kv": True},
    {"fixed_split_size": 4},
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("form", ["NHD-apart", "HND-apart", "NHD-together", "HND-together"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_decode(form: str, options: dict[str, Any]) -> None:
    lengths = [9, 4, 0, 17]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), form[:3])
    wrapper.plan(*csr(lengths, table), head_dim=SIZE, **SIZES | options)
    q = torch.randn(len(lengths), HEADS * GROUP, SIZE)
    o, lse = wrapper.run(q, stored(k, v, form), return_lse=True)
    for b in range(len(lengths)):
        expected = attend(
            q[b : b + 1],
            keys[b],
            values[b],
            scale=options.get("sm_scale", SIZE**-0.5),
            left=options.get("window_left", -1),
            softcap=options.get("logits_soft_cap", 0.0),
        )
        compare(o[b : b + 1], lse[b : b + 1], expected)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill(causal: bool, window_left: int, layout: str) -> None:
    lengths, queries = [9, 6, 17], [9, 0, 3]
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
    indptr = torch.tensor([0, 9, 9, 12], dtype=torch.int32)
    tables = csr(lengths, table)
    wrapper.plan(indptr, *tables, head_dim_qk=SIZE, causal=causal, window_left=window_left, **SIZES)
    q = torch.randn(12, HEADS * GROUP, SIZE)
    o, lse = wrapper.run(q, stored(k, v, f"{layout}-apart"), return_lse=True)
    parts = zip(
        torch.split(q, queries), keys, values, torch.split(o, queries), torch.split(lse, queries), strict=True
    )
    for rows, key, value, part, part_lse in parts:
        compare(part, part_lse, attend(rows, key, value, scale=SIZE**-0.5, left=window_left, causal=causal))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("cache", LARGEST, ids=str)
@pytest.mark.parametrize("form", ["NHD-apart", "HND-together"])
@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"k_scale": 0.25, "v_scale": 3},
        {"k_scale": torch.tensor([0.1, 0.4]), "v_scale": torch.tensor(0.5)},
    ],
    ids=["none", "numbers", "tensors"],
)
def test_caches_of_8_bits(cache: torch.dtype, form: str, scales: dict[str, Any]) -> None:
    lengths, queries, step = [9, 6, 17], [9, 0, 3], torch.tensor(0.05)
    k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
    codes = [coded(x.nan_to_num(), cache, step) for x in (k, v)]
    if form == "HND-together":
        codes = [x.view(torch.uint8) for x in codes]
    pools = stored(codes[0], codes[1], form)
    pools = pools.view(cache) if isinstance(pools, torch.Tensor) else pools
    factors = [torch.as_tensor(scales.get(name, 1.0)).float() for name in ("k_scale", "v_scale")]
    sizes = SIZES | {"q_data_type": torch.bfloat16, "kv_data_type": cache}
    tables = csr(lengths, table)
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace(), form[:3])
    indptr = torch.tensor([0, 9, 9, 12], dtype=torch.int32)
    prefill.plan(indptr, *tables, head_dim_qk=SIZE, causal=True, logits_soft_cap=3.0, **sizes)
    decode = BatchDecodeWithPagedKVCacheWrapper(workspace(), form[:3])
    decode.plan(*tables, head_dim=SIZE, logits_soft_cap=3.0, **sizes)
    for wrapper, counts in ((prefill, queries), (decode, [1, 1, 1])):
        q = torch.randn(sum(counts), HEADS * GROUP, SIZE).bfloat16()
        o, lse = wrapper.run(q, pools, return_lse=True, **scales)
        parts = (torch.split(x, counts) for x in (q, o, lse))
        for rows, part, part_lse, *own in zip(*parts, keys, values, strict=True):
            numbers = [meant(coded(x, cache, step), factor) for x, factor in zip(own, factors, strict=True)]
            expected, wanted = attend(rows, *numbers, scale=SIZE**-0.5, softcap=3.0)
            size = expected.abs().max().item() if expected.numel() else 0.0
            torch.testing.assert_close(part.double(), expected, rtol=2e-2, atol=1e-2 * size)
            torch.testing.assert_close(part_lse.double(), wanted / math.log(2), rtol=1e-4, atol=1e-4)


def test_a_cache_of_8_bits_is_as_planned() -> None:
    k, v, table, *_ = pages([3], PAGE, HEADS, SIZE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    sizes = SIZES | {"q_data_type": "float16", "kv_data_type": "float8_e5m2"}
    wrapper.plan(*csr([3], table), head_dim=SIZE, **sizes)
    q, pools = torch.zeros(1, HEADS * GROUP, SIZE).half(), (k.to(torch.float8_e5m2), v.to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"paged_kv_cache: expected dtype torch.float8_e5m2, as planned, got"):
        wrapper.run(q, (k.half(), v.half()))
    with pytest.raises(ValueError, match=r"k_scale: expected one, or shape \[1, 2\], got \[3\]"):
        wrapper.run(q, pools, k_scale=torch.ones(3))
    with pytest.raises(ValueError, match="v_scale: expected a finite number of float32, got inf"):
        wrapper.run(q, pools, v_scale=math.inf)
    with pytest.raises(TypeError, match="q_scale: expected a number, got 'half'"):
        wrapper.run(q, pools, q_scale="half")  # type: ignore[arg-type]  # what a program without types might say


def test_results_go_where_they_are_asked() -> None:
    k, v, table, *_ = pages([5], PAGE, HEADS, SIZE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*csr([5], table), head_dim=SIZE, **SIZES)
    q = torch.randn(1, HEADS * GROUP, SIZE)
    out, lse = torch.empty_like(q), torch.empty(1, HEADS * GROUP)
    found = wrapper.run(q, (k, v), out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    alone = wrapper.run(q, (k, v))
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)
    for _ in range(3):  # and where it is repeated
        kept = torch.empty_like(lse)
        assert isinstance(wrapper.run(q, (k, v), lse=kept), torch.Tensor)
        assert torch.equal(kept, lse)


def test_a_cache_without_pages_serves_requests_without_keys() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    none = torch.zeros(0, PAGE, HEADS, SIZE)
    q = torch.ones(2, HEADS * GROUP, SIZE)
    wrapper.plan(torch.zeros(3).int(), torch.zeros(0).int(), torch.zeros(2).int(), head_dim=SIZE, **SIZES)
    o, lse = wrapper.run(q, (none, none), return_lse=True)
    assert not o.any()
    assert lse.isneginf().all()
    wrapper.plan(torch.tensor([0, 1, 1]), torch.tensor([0]), torch.tensor([2, 0]), head_dim=SIZE, **SIZES)
    with pytest.raises(ValueError, match="paged_kv_cache: expected P to be at least 1, got 0"):
        wrapper.run(q, (none, none))

    graph = BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", True, False, torch.empty(3), torch.empty(4), torch.empty(2)
    )  # whose later plans may have keys
    graph.plan(torch.zeros(3).int(), torch.zeros(0).int(), torch.zeros(2).int(), head_dim=SIZE, **SIZES)
    with pytest.raises(ValueError, match="paged_kv_cache: expected P to be at least 1, got 0"):
        graph.run(q, (none, none))


def test_a_plan_of_the_same_sizes_needs_no_other_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and pages change from step to step, and nothing is looked up again."""
    asked, module = list[str](), importlib.import_module("attnc.adapters.flashinfer.wrapper")
    find = module.find_function

    def find_and_note(name: str, *given: Any) -> Any:
        asked.append(name)
        return find(name, *given)

    monkeypatch.setattr(module, "find_function", find_and_note)
    repeats.forget()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    k, v, table, keys, values = pages([11, 11], PAGE, HEADS, SIZE)
    for lengths, window_left in (([9, 4], -1), ([3, 11], -1), ([3, 11], 2), ([10, 6], 2)):
        wrapper.plan(*csr(lengths, table), head_dim=SIZE, **(SIZES | {"window_left": window_left}))
        q = torch.randn(2, HEADS * GROUP, SIZE)
        o, lse = wrapper.run(q, (k, v), return_lse=True)
        for b, kept in enumerate(lengths):
            seen = slice(0 if window_left < 0 else max(kept - 1 - window_left, 0), kept)
            known = keys[b][seen], values[b][seen]
            compare(o[b : b + 1], lse[b : b + 1], attend(q[b : b + 1], *known, scale=SIZE**-0.5))
    assert len(asked) == 2


def test_a_graph_reads_the_tables_of_a_later_plan() -> None:
    """With fixed buffers `plan` writes to the tensors that the first plan made."""
    buffers = (torch.empty(3), torch.empty(12), torch.empty(2))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2],
    )
    places = []
    table = torch.empty(0)
    for lengths in ([9, 4], [3, 30]):
        k, v, table, keys, values = pages(lengths, PAGE, HEADS, SIZE)
        wrapper.plan(*csr(lengths, table), head_dim=SIZE, **SIZES)
        assert wrapper._planned is not None
        places.append([x.data_ptr() for x in wrapper._planned.tables.values()])
        q = torch.randn(2, HEADS * GROUP, SIZE)
        o, lse = wrapper.run(q, (k, v), return_lse=True)
        for b in range(2):
            compare(
                o[b : b + 1],
                lse[b : b + 1],
                attend(q[b : b + 1], keys[b], values[b], scale=SIZE**-0.5),
            )
    assert places[0] == places[1]
    with pytest.raises(ValueError, match=r"expected 2 sequences with at most 12 pages, .* got 1 with 2"):
        wrapper.plan(*csr([5], table[:1]), head_dim=SIZE, **SIZES)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer: expected a tensor"):
        BatchDecodeWithPagedKVCacheWrapper(
            workspace(), use_cuda_graph=True, paged_kv_indptr_buffer=buffers[0]
        )


def test_dense_tables() -> None:
    indptr, indices = torch.tensor([0, 2, 2, 5]), torch.tensor([7, 3, 0, 9, 4])
    table, kv_len = make_tables(4, 3, indptr, indices, torch.tensor([1, 4, 3]))
    assert kv_len.tolist() == [5, 0, 11]
    assert table[0, :2].tolist() == [7, 3]
    assert table[2].tolist() == [0, 9, 4]
    assert (table.dtype, kv_len.dtype) == (torch.int32, torch.int32)
    nothing, none = make_tables(4, 1, torch.tensor([0, 0]), torch.tensor([]).long(), torch.tensor([0]))
    assert (nothing.shape, none.tolist()) == ((1, 1), [0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"pos_encoding_mode": "ROPE_LLAMA"},
            "pos_encoding_mode: expected 'NONE' or 'ALIBI', got 'ROPE_LLAMA'",
        ),
        (
            {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 30.0},
            "logits_soft_cap: expected 0 beside 'ALIBI', got 30.0",
        ),
        ({"rope_theta": 1e4}, "rope_theta: expected None, as it is not supported, got 10000.0"),
        ({"kv_data_type": "float8_e4m3fn"}, "kv_data_type: expected torch.float32, like q_data_type, got"),
        ({"q_data_type": "float17"}, "q_data_type: expected a dtype, got 'float17'"),
        ({"q_data_type": "float8_e4m3fn"}, "q_data_type: expected dtype .*float32, got torch.float8_e4m3fn"),
        (
            {"data_type": torch.float64},
            "kv_data_type: expected torch.float32, .*, got torch.float64",
        ),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"sm_scale": "small"}, "sm_scale: expected a number, got 'small'"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap: expected a finite number of float32, got inf"),
        ({"q_len_per_req": 0}, "q_len_per_req: expected at least 1, got 0"),
        ({"q_len_per_req": 1.0}, "q_len_per_req: expected an integer, got 1.0"),
        ({"window_right": -1}, "window_right: expected 0, got -1"),
        ({"num_qo_heads": 3}, "num_qo_heads: expected a multiple of num_kv_heads, 2, got 3"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected at least 1, got 0"),
        ({"indptr": torch.tensor([1, 1])}, r"indptr: expected numbers that ascend from 0, got \[1, 1\]"),
        (
            {"indptr": torch.tensor([0.0, 1.0])},
            "indptr: expected dtype torch.int32 or torch.int64, got torch.float32",
        ),
        ({"indptr": torch.tensor([0, 2])}, "indices: expected at least 2 numbers, got 1"),
        ({"last_page_len": torch.tensor([5])}, "last_page_len: expected 1 .. 4, got 5"),
        ({"last_page_len": torch.tensor([0])}, "last_page_len: expected 1 .. 4, got 0"),
        ({"fixed_split_size": 3}, "fixed_split_size: expected a multiple of 16 keys, got 12"),
        ({"seq_lens": torch.ones(1)}, "seq_lens: expected None"),
        ({"block_tables": torch.zeros(1, 1)}, r"block_tables: expected None, .*, got a tensor \[1, 1\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plans_that_are_refused(changed: dict[str, Any], said: str) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    tables = dict(zip(("indptr", "indices", "last_page_len"), csr([3], table), strict=True))
    with pytest.raises((TypeError, ValueError), match=said):
        BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            **{"head_dim": SIZE, **SIZES, **tables, **changed}
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"custom_mask": torch.ones(9)}, r"custom_mask: expected dtype torch.bool, got torch.float32"),
        ({"custom_mask": [True] * 9}, r"custom_mask: expected a tensor, got list"),
        ({"custom_mask": torch.ones(8).bool()}, r"custom_mask: expected 9 elements, got \[8\]"),
        ({"packed_custom_mask": torch.ones(3).byte()}, r"packed_custom_mask: expected 2 elements, got \[3\]"),
        ({"packed_custom_mask": torch.ones(2).bool()}, "packed_custom_mask: expected dtype torch.uint8, got"),
        ({"head_dim_vo": 0}, "head_dim_vo: expected at least 1, got 0"),
        (
            {"token_pos_in_items_len": 3},
            "token_pos_in_items_len: expected None, .* got 3",
        ),
        ({"prefix_len_ptr": torch.ones(1)}, "prefix_len_ptr: expected None"),
        ({"block_tables": torch.ones(1, 1)}, "block_tables: expected None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_prefills_that_are_refused(changed: dict[str, Any], said: str) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises((TypeError, ValueError), match=said):
        BatchPrefillWithPagedKVCacheWrapper(workspace()).plan(
            indptr, *csr([3], table), head_dim_qk=SIZE, **SIZES | changed
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k_scale": math.nan}, r"k_scale: expected a finite number of float32, got nan"),
        ({"v_scale": torch.ones(3)}, r"v_scale: expected one, or shape \[1, 2\], got \[3\]"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected shape \[4\], got \[3\]"),
        ({"out": torch.zeros(1, 4, 8)}, r"out: expected shape \[1, 4, 16\], got \[1, 4, 8\]"),
        ({"lse": torch.zeros(4)}, r"lse: expected shape \[1, 4\], got \[4\]"),
        (
            {"kv_cache_sf": torch.zeros(1)},
            r"kv_cache_sf: expected None, .* got a tensor",
        ),
        (
            {"q": torch.zeros(2, HEADS * GROUP, SIZE)},
            r"q: expected shape \[1, 4, 16\], as planned, got \[2, 4, 16\]",
        ),
        (
            {"q": torch.zeros(1, HEADS * GROUP, 8)},
            r"q: expected shape \[1, 4, 16\], as planned, got \[1, 4, 8\]",
        ),
        ({"paged_kv_cache": torch.zeros(3, 4, 2, 16)}, r"paged_kv_cache: expected shape \[pages, 2, ...\]"),
        ({"q": torch.zeros(1, 2, SIZE)}, r"q: expected shape \[1, 4, 16\], as planned, got \[1, 2, 16\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_runs_that_are_refused(changed: dict[str, Any], said: str) -> None:
    k, v, table, *_ = pages([3], PAGE, HEADS, SIZE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    arguments: dict[str, Any] = {"q": torch.zeros(1, HEADS * GROUP, SIZE), "paged_kv_cache": (k, v)}
    with pytest.raises(RuntimeError, match=r"run: expected a call of plan\(\) before"):
        wrapper.run(**arguments)
    wrapper.plan(*csr([3], table), head_dim=SIZE, **SIZES)
    with pytest.raises(ValueError, match=said):
        wrapper.run(**arguments | changed)
    with pytest.raises(TypeError, match=r"q: expected dtype torch.float32, as planned, got torch.float16"):
        wrapper.run(**arguments | {"q": torch.zeros(1, HEADS * GROUP, SIZE).half()})


def test_a_refused_plan_leaves_the_tables_of_a_graph_alone() -> None:
    buffers: dict[str, Any] = {
        f"paged_kv_{name}_buffer": torch.zeros(4) for name in ("indptr", "indices", "last_page_len")
    }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
    table = torch.arange(4, dtype=torch.int32)[:, None]
    indptr, indices, last = csr([3, 1, 2, 3], table)
    wrapper.plan(indptr, indices, last, head_dim=SIZE, **SIZES)
    assert wrapper._planned is not None
    before = {name: x.clone() for name, x in wrapper._planned.tables.items()}
    for wrong, refused in ((indptr[:2], {}), (indptr, {"kv_data_type": "float16"})):
        with pytest.raises(ValueError, match=r"indptr: expected shape \[5\]|kv_data_type: expected"):
            wrapper.plan(wrong, indices.flip(0), last, head_dim=SIZE, **SIZES | refused)
    for name, x in wrapper._planned.tables.items():
        assert torch.equal(x, before[name])


def test_layouts_have_names() -> None:
    with pytest.raises(ValueError, match="kv_layout: expected 'NHD' or 'HND', got 'DHN'"):
        BatchPrefillWithPagedKVCacheWrapper(workspace(), "DHN")


def test_tables_that_do_not_fit_are_named() -> None:
    names = ("starts", "pages", "rows")
    starts, last = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 9, 4])
    assert count_keys(names, 4, starts, torch.arange(5), last) == [7, 0, 12]
    for count in (0, 2, 4):
        with pytest.raises(ValueError, match=f"pages: expected at least 5 numbers, got {count}"):
            count_keys(names, 4, starts, torch.arange(count), last)
    for rows in (0, 5):
        with pytest.raises(ValueError, match=rf"rows: expected 1 .. 4, got {rows}"):
            count_keys(names, 4, starts, torch.arange(5), torch.tensor([3, 0, rows]))
    pool: Any = torch.zeros(3, 2, 4, 2, 8)
    assert [x.shape for x in split_cache(pool)] == [(3, 4, 2, 8)] * 2
    pairs: list[Any] = [(pool, pool), [pool, pool]]
    for pair in pairs:
        assert split_cache(pair) == (pool, pool)
    others: list[Any] = [(pool,), (pool, pool, pool), "ab", None, {0: pool, 1: pool}, pool[0], pool[:, :1]]
    for wrong in others:
        with pytest.raises((TypeError, ValueError), match="paged_kv_cache: expected"):
            split_cache(wrong)


def test_a_mask_of_a_graph_has_the_room_of_its_buffer() -> None:
    wrapper: Any = SimpleNamespace(_capacity={"mask": 16}, device=torch.device("cpu"))
    for keys in (3, 30, 64):
        custom = torch.rand(2 * keys) < 0.5
        found = Wrapper._mask_tables(wrapper, [0, 2], [keys], custom, None)
        used = -(-2 * keys // 8)
        other: Any = SimpleNamespace(_capacity=None, device=wrapper.device)
        plain = Wrapper._mask_tables(other, [0, 2], [keys], custom, None)["custom_mask"]
        assert found["custom_mask"].shape == (16,)
        assert torch.equal(found["custom_mask"][:used], plain)
        assert not found["custom_mask"][used:].any()
    with pytest.raises(ValueError, match="custom_mask_buf: expected room for 17 bytes, got 16"):
        Wrapper._mask_tables(wrapper, [0, 1], [136], torch.ones(136, dtype=torch.bool), None)


def test_tables_of_a_graph_are_written_where_it_reads_them() -> None:
    kept = {"block_table": torch.zeros(2, 3), "kv_len": torch.zeros(2)}
    known: Any = SimpleNamespace(tokens=1, tables=kept)
    new = {"block_table": torch.ones(2, 3), "kv_len": torch.full((2,), 7.0)}
    found = _write_kept(known, new, 1)
    assert all(found[name] is kept[name] and torch.equal(kept[name], new[name]) for name in kept)
    for tables, tokens, said in (
        (new, 2, "qo_indptr: expected 1 queries of each request, as in the first plan, got 2"),
        ({**new, "custom_mask": torch.ones(1)}, 1, "custom_mask: expected one in every plan"),
        (
            {**new, "kv_len": torch.ones(3)},
            1,
            r"kv_len: expected shape \[2\], as in the first plan",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            _write_kept(known, tables, tokens)
