"""Types of 16 and 8 bits through every wrapper, at the rounding that they have; what is refused of latents,
packed keys and single requests.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from attnc.adapters import flashinfer
from attnc.adapters.flashinfer import single
from attnc.adapters.flashinfer.arguments import compute_alibi_slopes
from tests.adapters.engines import LARGEST, coded, meant
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, csr, workspace
from tests.adapters.oracle import attend, pages

fi: Any = flashinfer  # what a program without types calls

STEP, SCALE = torch.tensor(0.05), 0.75
CACHES = [None, *LARGEST]


def near(o: torch.Tensor, expected: torch.Tensor) -> None:
    size = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=1e-2 * size)


def stored_as(x: torch.Tensor, cache: torch.dtype | None) -> torch.Tensor:
    return x.bfloat16() if cache is None else coded(x.nan_to_num(), cache, STEP)


def read_as(x: torch.Tensor, cache: torch.dtype | None) -> torch.Tensor:
    return x.bfloat16() if cache is None else meant(coded(x, cache, STEP), torch.tensor(SCALE))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_packed_and_single(cache: torch.dtype | None) -> None:
    torch.manual_seed(0)
    rows, lengths = [5, 1], [9, 17]
    q = torch.randn(sum(rows), HEADS * GROUP, SIZE).bfloat16()
    k, v = (torch.randn(sum(lengths), HEADS, SIZE) for _ in range(2))
    scales: dict[str, Any] = {} if cache is None else {"k_scale": SCALE, "v_scale": SCALE}
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    starts, ends = torch.tensor([0, 5, 6]), torch.tensor([0, 9, 26])
    types: dict[str, Any] = {"q_data_type": "bfloat16", "kv_data_type": cache}
    wrapper.plan(starts, ends, HEADS * GROUP, HEADS, SIZE, causal=True, **types)
    packed = wrapper.run_return_lse(q, stored_as(k, cache), stored_as(v, cache), **scales)[0]
    expected = [
        attend(q[a:b], read_as(k[c:d], cache), read_as(v[c:d], cache), scale=SIZE**-0.5)[0]
        for (a, b), (c, d) in zip(pairwise([0, 5, 6]), pairwise([0, 9, 26]), strict=True)
    ]
    near(packed, torch.cat(expected))
    first = (stored_as(k[:9], cache), stored_as(v[:9], cache))
    near(fi.single_prefill_with_kv_cache_return_lse(q[:5], *first, causal=True, **scales)[0], expected[0])
    last = (stored_as(k[9:], cache), stored_as(v[9:], cache))
    one = fi.single_decode_with_kv_cache(q[5], *last, **scales)
    assert isinstance(one, torch.Tensor)
    near(one[None], expected[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("together", [True, False])
def test_latents(cache: torch.dtype | None, together: bool) -> None:
    lengths, rows, width = [9, 4], [2, 3], 32
    k, _, table, keys, _ = pages(lengths, PAGE, 1, width + 16)
    pool = stored_as(k, cache)[:, :, 0]
    ckv, kpe = pool[..., :width], pool[..., width:]
    if not together:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    indptr, indices, _ = csr(lengths, table)
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    types = (torch.bfloat16, cache or torch.bfloat16)
    wrapper.plan(
        torch.tensor([0, 2, 5]), indptr, indices, torch.tensor(lengths), 4, width, 16, PAGE, True, 0.2, *types
    )
    q = torch.randn(5, 4, width + 16).bfloat16()
    scales: dict[str, Any] = {} if cache is None else {"ckv_scale": SCALE, "kpe_scale": SCALE}
    o = wrapper.run(q[..., :width], q[..., width:], ckv, kpe, **scales)
    assert isinstance(o, torch.Tensor)
    for b, (part, found) in enumerate(zip(torch.split(q, rows), torch.split(o, rows), strict=True)):
        own = read_as(keys[b], cache)
        near(found, attend(part, own, own[..., :width], scale=0.2)[0])


@pytest.mark.parametrize("scales", [(0.5, 0.03), (0.03, 0.5), (-0.25, 0.5), (0.0, 0.5), (0.0, 0.0)], ids=str)
def test_latents_and_rotated_keys_have_scales_of_their_own(scales: tuple[float, float]) -> None:
    lengths, width = [9, 4], 32
    k, _, table, keys, _ = pages(lengths, PAGE, 1, width + 16)
    pool = stored_as(k, torch.float8_e4m3fn)[:, :, 0]
    indptr, indices, _ = csr(lengths, table)
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    sizes = (torch.tensor(lengths), 4, width, 16, PAGE, False, 0.2, torch.bfloat16, torch.float8_e4m3fn)
    wrapper.plan(torch.tensor([0, 1, 2]), indptr, indices, *sizes)
    q = torch.randn(2, 4, width + 16).bfloat16()
    ckv_scale, kpe_scale = scales
    given = (q[..., :width], q[..., width:], pool[..., :width], pool[..., width:])
    o = wrapper.run(*given, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    for b, (part, found) in enumerate(zip(torch.split(q.float(), 1), torch.split(o, 1), strict=True)):
        raw = stored_as(keys[b], torch.float8_e4m3fn).float()
        own = torch.cat((raw[..., :width] * ckv_scale, raw[..., width:] * kpe_scale), -1)
        expected = attend(part, own, own[..., :width], scale=0.2)[0]
        torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.02)


def test_latents_of_requests_without_keys_and_tables_that_are_longer() -> None:
    """FlashInfer reads B + 1 numbers of kv_indptr, whatever follows."""
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    sizes = (4, 32, 16, PAGE, False, 0.2, torch.float32, torch.float32)
    q_nope, q_pe = torch.randn(2, 4, 32), torch.randn(2, 4, 16)
    cache, more = torch.randn(3, PAGE, 48), torch.tensor([0, 2, 3, 7, 9])
    found = []
    for indptr in (more[:3], more):
        wrapper.plan(torch.tensor([0, 1, 2]), indptr, torch.arange(3), torch.tensor([7, 3]), *sizes)
        found.append(wrapper.run(q_nope, q_pe, cache[..., :32], cache[..., 32:]))
    assert torch.equal(*found)
    given: Any = (q_nope, q_pe, cache[..., :32], cache[..., 32:])
    kept, (_, log_sum) = torch.empty(2, 4), wrapper.run(*given, return_lse=True, return_lse_base_on_e=True)
    assert isinstance(wrapper.run(*given, lse=kept, return_lse_base_on_e=True), torch.Tensor)
    assert torch.equal(kept, log_sum)
    none = torch.zeros(3).int()
    wrapper.plan(torch.tensor([0, 1, 2]), none, none[:0], none[:2], *sizes)
    empty = cache[:0]
    o, lse = wrapper.run(q_nope, q_pe, empty[..., :32], empty[..., 32:], return_lse=True)
    assert not o.any()
    assert lse.isneginf().all()


def test_a_data_type_is_of_what_no_other_says() -> None:
    """As in FlashInfer, where it is a name of before there were two."""
    for named, expected in (
        (
            {"data_type": torch.float8_e4m3fn, "q_data_type": torch.bfloat16},
            (torch.bfloat16, torch.float8_e4m3fn),
        ),
        ({"data_type": torch.bfloat16, "q_data_type": None}, (torch.bfloat16, None)),
        ({"data_type": torch.float16}, (torch.float16, None)),
    ):
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
        tables = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3])
        wrapper.plan(*tables, 4, 2, 32, PAGE, **named)
        wanted = wrapper._plan_of_run().wanted
        assert (wanted.dtype, wanted.cache) == expected


LATENT: dict[str, Any] = {
    "qo_indptr": torch.tensor([0, 1]),
    "kv_indptr": torch.tensor([0, 1]),
    "kv_indices": torch.tensor([0]),
    "kv_len_arr": torch.tensor([3]),
    "num_heads": 4,
    "head_dim_ckv": 32,
    "head_dim_kpe": 16,
    "page_size": 4,
    "causal": False,
    "sm_scale": 0.2,
    "q_data_type": torch.float32,
    "kv_data_type": torch.float32,
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_profiler": True}, "use_profiler: expected None"),
        ({"head_dim_kpe": -1}, "head_dim_kpe: expected at least 0, got -1"),
        ({"kv_data_type": torch.int8}, "kv_data_type: expected torch.float32, like q_data_type, got"),
        ({"kv_len_arr": torch.tensor([5])}, "kv_len_arr: expected 0 .. 4 for request 0, got 5"),
        ({"kv_len_arr": torch.tensor([1, 1])}, r"kv_indptr: expected shape \[3\], got \[2\]"),
        ({"qo_indptr": torch.tensor([0])}, r"qo_indptr: expected shape \[2\], got \[1\]"),
        ({"kv_indices": None}, "kv_indices: expected a tensor, got NoneType"),
        ({"kv_indptr": None}, "cum_seq_lens_q: expected a tensor, got NoneType"),
        ({"page_size": True}, "page_size: expected an integer, got True"),
        ({"num_heads": None}, "num_heads: expected an integer, got None"),
        ({"scale_mode": "bmm-scalar"}, "scale_mode, output_scale: expected 'default' .* got 'bmm-scalar'"),
        ({"skip_softmax": True}, "skip_softmax: expected None"),
        ({"kv_indices": torch.zeros(0).int()}, "kv_indices: expected at least 1 numbers, got 0"),
        ({"sm_scale": None, "head_dim_ckv": 0}, "head_dim_ckv: expected at least 1, got 0"),
        (
            {"qo_indptr": torch.tensor([0, -1])},
            r"qo_indptr: expected numbers that ascend from 0, got \[0, -1\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plans_of_latents_that_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        fi.BatchMLAPagedAttentionWrapper(workspace()).plan(**{**LATENT, **changed})


DENSE = {
    "cum_seq_lens_q": torch.tensor([0, 1]),
    "block_tables": torch.tensor([[0]]),
    "seq_lens": torch.tensor([3]),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("seq_lens", [[3]]),
        ("seq_lens", [3.0]),
        ("block_tables", [0]),
        ("block_tables", [[0], [0]]),
        ("block_tables", [[0.0]]),
        ("cum_seq_lens_q", [0, 1, 1]),
        ("cum_seq_lens_q", [0.0, 1.0]),
    ],
)
def test_dense_tables_that_are_refused(name: str, wrong: list[Any]) -> None:
    """Each by its name, however it is passed."""
    rest = {key: value for key, value in LATENT.items() if not key.startswith(("qo_", "kv_i", "kv_len"))}
    tables = {**DENSE, name: torch.tensor(wrong)}
    metadata = (fi.MLAPlanMetadata(**tables), fi.MLAPlanMetadata.dense(*tables.values()))
    for given in (tables, *({"metadata": each} for each in metadata)):
        with pytest.raises((TypeError, ValueError), match=f"plan: {name}: expected (shape|dtype)"):
            fi.BatchMLAPagedAttentionWrapper(workspace()).plan(**rest, **given)


def test_metadata_has_tables_of_either_kind() -> None:
    tables = [torch.tensor([number]) for number in range(4)]
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    csr = fi.MLAPlanMetadata.csr(*tables)
    assert [getattr(csr, name) for name in names] == tables
    names = ("cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len")
    dense = fi.MLAPlanMetadata.dense(*tables)
    assert [getattr(dense, name) for name in (*names, "kv_indptr")] == [*tables, None]


def test_runs_of_latents_that_are_refused() -> None:
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    given: dict[str, Any] = {"q_nope": torch.zeros(1, 4, 32), "q_pe": torch.zeros(1, 4, 16)}
    given |= {"ckv_cache": torch.zeros(2, 4, 32), "kpe_cache": torch.zeros(2, 4, 16)}
    with pytest.raises(RuntimeError, match=r"run: expected a call of plan\(\) before"):
        wrapper.run(**given)
    wrapper.plan(**LATENT)
    for changed, said in (
        ({"q_pe": torch.zeros(1, 4, 8)}, r"q_pe: expected shape \[1, 4, 16\], as planned, got \[1, 4, 8\]"),
        ({"q_nope": torch.zeros(2, 4, 32)}, r"q_nope: expected shape \[1, 4, 32\], as planned, got"),
        (
            {"ckv_cache": torch.zeros(2, 4, 1, 32)},
            r"ckv_cache: expected shape \[P, page, 32\], as planned, got",
        ),
        (
            {"kpe_cache": torch.zeros(3, 4, 16)},
            r"kpe_cache: expected shape \[2, 4, 16\], as planned, got \[3, 4, 16\]",
        ),
        ({"ckv_scale": 0.5}, "run with a cache of 16 bits: ckv_scale: expected None"),
        ({"o_scale": 0.5}, "o_scale: expected None"),
        ({"page_table": torch.zeros(1, 1)}, "page_table: expected None"),
        ({"bmm1_scale": 0.5}, "bmm1_scale: expected None"),
        ({"q_pe": None}, "q_pe: expected a tensor, got NoneType"),
        ({"query": torch.zeros(1, 4, 48)}, r"q_nope: expected None beside query, got \[1, 4, 32\]"),
        ({"query": 3, "q_nope": None, "q_pe": None}, "query: expected a tensor or a pair of them, got int"),
        ({"kpe_cache": torch.zeros(2, 4, 16).half()}, "kpe_cache: expected dtype torch.float32, as planned"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            wrapper.run(**{**given, **changed})
    narrow = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e5m2}
    wrapper.plan(**{**LATENT, **narrow})
    small = {name: x.bfloat16() if name[0] == "q" else x.to(torch.float8_e5m2) for name, x in given.items()}
    with pytest.raises(TypeError, match="kpe_scale: expected a number, got None"):
        wrapper.run(**small, ckv_scale=0.5)
    for backend in ("cudnn", "fa4"):
        with pytest.raises(ValueError, match=f"backend: expected .* got '{backend}'"):
            fi.BatchMLAPagedAttentionWrapper(workspace(), backend=backend)


def test_packed_calls_that_are_refused() -> None:
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    starts, sizes = torch.tensor([0, 3]), (HEADS * GROUP, HEADS, SIZE)
    for said, ends, options in (
        ("kv_indptr: expected 2 numbers, like qo_indptr, got 3", torch.tensor([0, 1, 2]), {}),
        (r"kv_indptr: expected shape \[requests \+ 1\], got \[1, 2\]", torch.tensor([[0, 1]]), {}),
        ("v_indptr: expected None", starts, {"v_indptr": starts}),
        (
            "logits_soft_cap: expected a finite number of float32, got nan",
            starts,
            {"logits_soft_cap": torch.nan},
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            wrapper.plan(starts, ends, *sizes, **options)
    wrapper.plan(starts, torch.tensor([0, 5]), *sizes, q_data_type="float32")
    q, k = torch.zeros(3, HEADS * GROUP, SIZE), torch.zeros(5, HEADS, SIZE)
    for said, tensors, given in (
        (r"q: expected shape \[3, 4, 16\], as planned, got \[2, 4, 16\]", (q[:2], k, k), {}),
        (r"k: expected shape \[5, 2, 16\], as planned", (q, k[:4], k[:4]), {}),
        (r"v: expected shape \[5, 2, 16\], as planned", (q, k, k[:4]), {}),
        (r"v: expected shape \[5, 2, 16\], as planned, got \[5, 16\]", (q, k, k[:, 0]), {}),
        ("o_scale: expected None or 1.0, got 0.5", (q, k, k), {"o_scale": 0.5}),
        ("k: expected dtype torch.float32, as planned, got torch.float16", (q, k.half(), k.half()), {}),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            wrapper.run(*tensors, **given)


def test_single_calls_that_are_refused() -> None:
    q, k = torch.zeros(3, HEADS * GROUP, SIZE), torch.zeros(5, HEADS, SIZE)
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"k: expected shape \[N, Hkv, 16\], got \[5, 16\]", {"k": k[:, 0]}),
        (r"v: expected shape \[5, 2, Dv\], got \[4, 2, 16\]", {"v": k[:4]}),
        (
            "q: expected heads that are a multiple of the 3 of k, got 4",
            {"k": torch.zeros(5, 3, SIZE), "v": torch.zeros(5, 3, SIZE)},
        ),
        ("v: expected dtype torch.float32, like k, got torch.float16", {"v": k.half()}),
        ("k: expected dtype torch.float32, beside q, got torch.float16", {"k": k.half()}),
        ("kv_layout: expected 'NHD' or 'HND', got 'DHN'", {"kv_layout": "DHN"}),
        ("backend: expected one of", {"backend": "cudnn"}),
        ("scale_q: expected None", {"scale_q": torch.ones(4)}),
        ("scale_k: expected None beside k_scale", {"scale_k": torch.ones(2), "k_scale": 0.5}),
        ("o_dtype: expected torch.float32, like q, got torch.float16", {"o_dtype": torch.float16}),
        (r"custom_mask: expected 15 elements, got \[3, 4\]", {"custom_mask": torch.ones(3, 4).bool()}),
        ("rope_theta: expected None", {"rope_theta": 1e4}),
    ]
    for said, changed in cases:
        with pytest.raises((TypeError, ValueError), match=said):
            fi.single_prefill_with_kv_cache(**{"q": q, "k": k, "v": k, **changed})
    with pytest.raises(
        ValueError, match=r"single_decode_with_kv_cache: q: expected shape \[heads, head_dim\], got \[3"
    ):
        fi.single_decode_with_kv_cache(q, k, k)


def test_graphs_take_what_their_buffers_hold() -> None:
    table = pages([9, 4], PAGE, HEADS, SIZE)[2]
    tables = csr([9, 4], table)
    decode = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(), torch.empty(3), torch.empty(4), torch.empty(2)
    )
    assert decode.is_cuda_graph_enabled
    sizes = (HEADS * GROUP, HEADS, SIZE, PAGE)
    decode.plan(*tables, *sizes, q_data_type="float32")
    with pytest.raises(ValueError, match=r"qo_indptr: expected 1 queries of each request, .* got 2"):
        decode.plan(*tables, *sizes, q_data_type="float32", q_len_per_req=2)
    buffers = tuple(torch.empty(size) for size in (3, 3, 4, 2))
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    starts = torch.tensor([0, 1, 2])
    prefill.plan(starts, *tables, *sizes, q_data_type="float32")
    mask = torch.ones(13, dtype=torch.bool)
    with pytest.raises(ValueError, match="custom_mask_buf: expected room for 3 bytes, got 0"):
        prefill.plan(starts, *tables, *sizes, q_data_type="float32", custom_mask=mask)
    masked = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers, torch.empty(4))
    masked.plan(starts, *tables, *sizes, q_data_type="float32", custom_mask=mask)
    with pytest.raises(ValueError, match="custom_mask: expected one in every plan of a graph or in none"):
        masked.plan(starts, *tables, *sizes, q_data_type="float32")
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, torch.empty(3), torch.empty(3))
    with pytest.raises(ValueError, match="qo_indptr: expected 2 requests, as in the buffers, got 1"):
        ragged.plan(torch.tensor([0, 1]), torch.tensor([0, 1]), *sizes[:3])
    longer = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, torch.empty(3), torch.empty(7))
    longer.plan(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), *sizes[:3])


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 17, 40])
def test_slopes_of_any_number_of_heads(heads: int) -> None:
    """Those of a power of two are powers of one number; the others are every other one of twice as many."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    whole = 2 ** int(math.log2(heads))
    expected = of_power(whole) + of_power(2 * whole)[::2][: heads - whole]
    found = compute_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


def test_few_queries_of_one_request_have_tiles_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def kernel_of(wanted: Any) -> Any:
        made.append((wanted.decode, wanted.rows if wanted.decode else None))
        return lambda q, **rest: (torch.zeros_like(q), torch.zeros(q.shape[:-1]))

    monkeypatch.setattr(single, "kernel", kernel_of)
    monkeypatch.setattr(single, "_kernel", single._kernel.__wrapped__)
    for queries, heads in ((1, 4), (4, 4), (2, 32), (8, 16), (8, 32), (0, 4), (300, 4)):
        q, k = torch.zeros(queries, heads, 16), torch.zeros(9, 2, 16)
        o, _ = fi.single_prefill_with_kv_cache(q, k, k, return_lse=True)
        assert o.shape == q.shape
    rows = (16, 16, 32, 64, 64)
    assert made == [*((True, size) for size in rows), *[(False, None)] * 2]
