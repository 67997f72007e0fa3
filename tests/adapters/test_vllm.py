"""The adapter for vLLM's unified_attention against float64, in every mixture of prefill and decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.adapters.specs import readable
from attnc.adapters.vllm import unified_attention, unified_attention_diffkv
from tests.adapters.engines import LARGEST, coded, meant
from tests.adapters.oracle import attend, pages
from tests.profiles import is_night

HEADS, GROUP, SIZE, PAGE = 2, 3, 16, 8


def problem(queries: list[int], lengths: list[int], page: int = PAGE) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of a call for sequences of these lengths, and (q, k, v) of each."""
    k, v, table, keys, values = pages(lengths, page, HEADS, SIZE)
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    q = torch.randn(int(cu[-1]), HEADS * GROUP, SIZE)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": torch.full_like(q, torch.nan),
        "cu_seqlens_q": cu,
        "max_seqlen_q": max(queries),
        "seqused_k": torch.tensor(lengths, dtype=torch.int32),
        "max_seqlen_k": max(lengths),
        "softmax_scale": SIZE**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }
    return arguments, list(zip(torch.split(q, queries), keys, values, strict=True))


def check(
    queries: list[int], lengths: list[int], *, page: int = PAGE, padding: int = 0, **changed: Any
) -> None:
    """padding: rows of q behind the last sequence."""
    arguments, sequences = problem(queries, lengths, page)
    for name in ("q", "out"):
        x = arguments[name]
        arguments[name] = torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])
    arguments |= changed
    unified_attention(**arguments)
    found, bias = torch.split(arguments["out"][: sum(queries)], queries), arguments.get("qq_bias")
    for b, (o, (q, k, v)) in enumerate(zip(found, sequences, strict=True)):
        expected, _ = attend(
            q,
            k,
            v,
            scale=arguments["softmax_scale"],
            left=arguments["window_size"][0],
            softcap=arguments["softcap"],
            slopes=arguments.get("alibi_slopes"),
            sinks=arguments.get("sinks"),
            bias=bias if bias is None else bias.expand(len(queries), -1, -1)[b, : len(q), : len(q)],
            causal=arguments["causal"],
        )
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"softmax_scale": 0.3, "page": 16},
    {"window_size": (5, 0)},
    {"softcap": 2.5},
    {"softcap": -2.5},
    {"alibi_slopes": torch.linspace(0.1, 1, HEADS * GROUP)},
    {"sinks": torch.linspace(-1, 2, HEADS * GROUP)},
    {"window_size": (9, 0), "softcap": 4.0, "sinks": torch.zeros(HEADS * GROUP).bfloat16()},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_decode(variant: dict[str, Any]) -> None:
    check([1, 1, 1], [20, 1, 33], are_uniform=True, **variant)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_rows_that_only_fit_by_their_number(variant: dict[str, Any]) -> None:
    """Sequences have fewer tokens, in any order, and the last rows are padding."""
    check([1, 0, 1], [20, 5, 33], padding=1, **variant)
    check([7, 0, 6], [9, 5, 40], padding=8, **variant)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_prefill_and_decode_together(variant: dict[str, Any]) -> None:
    check([7, 1, 0, 12], [7, 20, 5, 19], **variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_drafts_of_every_sequence(variant: dict[str, Any]) -> None:
    """As many new tokens of each share a tile of queries, and the keys are split."""
    check([4, 4, 4], [20, 4, 33], are_uniform=True, **variant)


@pytest.mark.parametrize("queries", [[4, 4], [1, 9, 0]], ids=str)
def test_tokens_that_see_all_keys(queries: list[int]) -> None:
    lengths = [new + old for new, old in zip(queries, [20, 0, 5], strict=False)]
    for are_uniform in {False, len({*queries}) == 1}:
        check(queries, lengths, causal=False, softcap=2.0, are_uniform=are_uniform)


BRANCHES = torch.tensor([[0, 9, 9, 9], [0.5, 0, 9, 9], [1, 9, 0, 9], [0, -2, 9, 0]]).float()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("queries", [[4, 4], [2, 2, 2], [4, 1, 3]], ids=str)
def test_trees_of_drafts(queries: list[int]) -> None:
    """A bias between new tokens: minus infinity hides a branch from another; keys before them have none."""
    hidden = BRANCHES.masked_fill(BRANCHES == 9, -torch.inf)
    check(queries, [new + old for new, old in zip(queries, [20, 0, 33], strict=False)], qq_bias=hidden)
    check(queries, [new + 5 for new in queries], qq_bias=hidden.bfloat16(), softcap=2.0, window_size=(3, 0))
    each = torch.stack([hidden - 0.5 * b for b in range(len(queries))])
    lengths = [new + old for new, old in zip(queries, [20, 0, 33], strict=False)]
    check(queries, lengths, qq_bias=each, are_uniform=len({*queries}) == 1)


def test_biases_of_other_sequences_are_named() -> None:
    with pytest.raises(ValueError, match=r"qq_bias: expected shape \[2, X, X\], got \[3, 4, 4\]"):
        check([4, 4], [9, 9], qq_bias=BRANCHES.expand(3, 4, 4))


@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), min_size=1, max_size=4),
    page=st.sampled_from([1, 5, 16]),
    left=st.sampled_from([-1, 0, 3]),
)
@settings(max_examples=15 if is_night() else 8)
def test_any_batch(sequences: list[tuple[int, int]], page: int, left: int) -> None:
    """Any new tokens after any earlier ones."""
    queries = [new for new, _ in sequences]
    check(
        queries, [new + old for new, old in sequences], page=page, window_size=(left, 0 if left >= 0 else -1)
    )


def test_what_vllms_backend_passes_in_every_call_asks_for_nothing() -> None:
    off: dict[str, Any] = {
        "output_scale": None,
        "rswa_prefix_lens": None,
        "rswa_window": None,
        "kv_quant_mode": 0,
    }
    off |= {"k_scale_cache": None, "v_scale_cache": None, "chunk_lookback": -1, "use_alibi_sqrt": False}
    check([3, 1], [20, 9], **off, use_td=True, mm_prefix_clamp_sliding_window=True)


def test_values_of_another_width() -> None:
    """By the argument list of vLLM's function for them, of one cache for both."""
    arguments, sequences = problem([3, 1], [20, 9])
    cache = torch.cat([arguments.pop("k"), arguments.pop("v")[..., :8]], -1)
    arguments |= {
        "k": cache[..., :SIZE],
        "v": cache[..., SIZE:],
        "out": arguments["out"][..., :8].contiguous(),
    }
    del arguments["max_seqlen_k"]
    unified_attention_diffkv(**arguments)
    for o, (q, k, v) in zip(torch.split(arguments["out"], [3, 1]), sequences, strict=True):
        expected, _ = attend(q, k, v[..., :8], scale=SIZE**-0.5)
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_pad_a_graph() -> None:
    """Sequences without a token come last; their rows of `out` are of no interest and hurt nobody."""
    arguments, sequences = problem([1, 1], [9, 20])
    padded = {name: torch.cat([arguments[name], arguments[name][:1]]) for name in ("q", "out", "block_table")}
    padded["seqused_k"] = torch.tensor([9, 20, 0], dtype=torch.int32)
    padded["cu_seqlens_q"] = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    unified_attention(**arguments | padded)
    for b, (q, k, v) in enumerate(sequences):
        expected, _ = attend(q, k, v, scale=SIZE**-0.5)
        torch.testing.assert_close(padded["out"][b : b + 1].double(), expected, rtol=1e-5, atol=1e-5)


def test_pools_laid_out_by_heads() -> None:
    arguments, _ = problem([1, 1], [9, 20])
    by_heads = {name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "kv"}
    unified_attention(**arguments | by_heads)
    plain, _ = problem([1, 1], [9, 20])
    unified_attention(**plain)
    assert torch.equal(arguments["out"], plain["out"])


def test_an_unquantised_cache_ignores_descales() -> None:
    """vLLM hands its scales over whatever the cache, and applies them to quantised ones."""
    check([1], [9], k_descale=torch.tensor([[7.0]]), v_descale=torch.tensor([[7.0]]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"causal": torch.ones(1)}, r"causal: expected True or False, got tensor"),
        (
            {"causal": False, "window_size": (4, 0)},
            r"window_size: expected \(-1, -1\), as causal is False, got \(4, 0\)",
        ),
        ({"softmax_scale": None}, "softmax_scale: expected a number, got None"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected a finite number of float32, got nan"),
        ({"softcap": "high"}, "softcap: expected a number, got 'high'"),
        ({"window_size": 5}, r"window_size: expected \(left, right\), integers, -1 for none, got 5"),
        ({"window_size": (1.5, 0)}, r"window_size: expected .*, got \(1.5, 0\)"),
        (
            {"q_descale": torch.ones(1)},
            r"q_descale: expected None, as it is not supported, got a tensor \[1\]",
        ),
        ({"output_scale": torch.ones(1)}, "output_scale: expected None"),
        ({"qq_bias": torch.zeros(3)}, r"qq_bias: expected .*, got \[3\]"),
        ({"mm_prefix_range": torch.zeros(1, 1, 2)}, "mm_prefix_range: expected None"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt: expected None, as it is not supported, got True"),
        ({"kv_quant_mode": 2}, "kv_quant_mode: expected 0 or 1, got 2"),
        ({"chunk_lookback": 1}, "chunk_lookback: expected -1, got 1"),
        ({"of_a_later_version": 1}, "of_a_later_version: expected None"),
        ({"window_size": (4, 4)}, "window_size: expected at most 0 keys on the right, got 4"),
        (
            {"block_table": torch.zeros(3, 4, dtype=torch.int32)},
            r"block_table: expected shape \[1, any\], got \[3, 4\]",
        ),
        ({"sinks": torch.zeros(5)}, r"sinks: expected shape \[6\], got \[5\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused(changed: dict[str, Any], said: str) -> None:
    arguments, _ = problem([1], [9])
    with pytest.raises((TypeError, ValueError), match=said):
        unified_attention(**arguments | changed)
    assert arguments["out"].isnan().all()


SCALES: list[dict[str, torch.Tensor | None]] = [
    {"k_descale": None, "v_descale": None},
    {"k_descale": torch.tensor(0.25), "v_descale": torch.tensor([3.0])},
    {"k_descale": torch.tensor([0.125, 0.5]).expand(3, 2), "v_descale": torch.tensor([[0.5, 7.0]])},
    {"k_descale": torch.rand(3, 2) + 0.1, "v_descale": None},
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("cache", LARGEST, ids=str)
@pytest.mark.parametrize("scales", SCALES, ids=["none", "of all", "of heads", "of sequences"])
@pytest.mark.parametrize("queries", [[1, 1, 1], [7, 1, 12]], ids=["decode", "mixed"])
def test_caches_of_8_bits(
    cache: torch.dtype, scales: dict[str, torch.Tensor | None], queries: list[int]
) -> None:
    lengths = [20, 1, 33]
    arguments, sequences = problem(queries, lengths)
    codes = {name: coded(arguments[name].nan_to_num(), cache, torch.tensor(0.05)) for name in "kv"}
    changed: dict[str, Any] = {"q": arguments["q"].bfloat16(), "out": arguments["out"].bfloat16()}
    changed |= codes | scales | {"softcap": 3.0, "sinks": torch.linspace(-1, 2, HEADS * GROUP)}
    unified_attention(**arguments | changed)
    found, at = torch.split(changed["out"], queries), torch.split(changed["q"], queries)
    for b, (o, q, (_, k, v)) in enumerate(zip(found, at, sequences, strict=True)):
        own = [
            meant(coded(x, cache, torch.tensor(0.05)), torch.ones(2) if s is None else s.expand(3, 2)[b])
            for x, s in ((k, scales["k_descale"]), (v, scales["v_descale"]))
        ]
        expected, _ = attend(q, *own, scale=SIZE**-0.5, softcap=3.0, sinks=changed["sinks"])
        size = expected.abs().max().item()
        torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=1e-2 * size)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": torch.float8_e4m3fn}, "k: expected dtype torch.float32, beside q, got torch.float8_e4m3fn"),
        (
            {"q": torch.bfloat16, "k": torch.uint8},
            r"k: expected dtype torch.bfloat16 or .*int8 .*, got torch.uint8: .*k.view\(torch.float8_e4m3fn",
        ),
        (
            {"q": torch.float16, "k": torch.int8, "v": torch.float8_e5m2},
            "v: expected dtype torch.int8, like k, got torch.float8_e5m2",
        ),
        ({"q": torch.float64}, r"q: expected dtype torch.float16, .*, got torch.float64"),
    ],
    ids=str,
)
def test_types_that_do_not_go_together_are_named(changed: dict[str, torch.dtype], said: str) -> None:
    arguments, _ = problem([1], [9])
    arguments |= {name: arguments[name].nan_to_num().to(dtype) for name, dtype in changed.items()}
    with pytest.raises(TypeError, match=said):
        unified_attention(**arguments)


def test_scales_of_another_shape_are_named() -> None:
    arguments, _ = problem([1], [9])
    narrow = {name: arguments[name].to(torch.float8_e5m2) for name in "kv"}
    narrow |= {name: arguments[name].half() for name in ("q", "out")}
    with pytest.raises(ValueError, match=r"v_descale: expected one, or shape \[1, 2\], got \[3\]"):
        unified_attention(**arguments | narrow | {"v_descale": torch.ones(3)})
    with pytest.raises(TypeError, match=r"k_descale: expected dtype torch.float32, got torch.float64"):
        unified_attention(**arguments | narrow | {"k_descale": torch.ones(1, 2).double()})
    with pytest.raises(TypeError, match="v_descale: expected a number, got 'one'"):
        unified_attention(**arguments | narrow | {"v_descale": "one"})


@pytest.mark.parametrize("cache", LARGEST, ids=str)
def test_which_gpus_read_a_cache(cache: torch.dtype) -> None:
    old = readable(cache, (8, 6))
    assert bool(old) == (cache is torch.float8_e4m3fn)
    assert "compute capability 8.9 or newer, and this GPU has 8.6" in old or not old
    assert readable(cache, (8, 9)) == readable(cache, (12, 0)) == ""
