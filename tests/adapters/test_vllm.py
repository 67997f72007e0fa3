"""The adapter for vLLM's unified_attention against float64, in every mixture of prefill and decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.adapters.vllm import unified_attention
from tests.adapters.oracle import attend, pages

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


def check(queries: list[int], lengths: list[int], *, page: int = PAGE, **changed: Any) -> None:
    arguments, sequences = problem(queries, lengths, page)
    arguments |= changed
    unified_attention(**arguments)
    found = torch.split(arguments["out"], queries)
    for o, (q, k, v) in zip(found, sequences, strict=True):
        expected, _ = attend(
            q,
            k,
            v,
            scale=arguments["softmax_scale"],
            left=arguments["window_size"][0],
            softcap=arguments["softcap"],
            slopes=arguments.get("alibi_slopes"),
            sinks=arguments.get("sinks"),
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


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_decode(variant: dict[str, Any]) -> None:
    check([1, 1, 1], [20, 1, 33], **variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_prefill_and_decode_together(variant: dict[str, Any]) -> None:
    check([7, 1, 0, 12], [7, 20, 5, 19], **variant)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), min_size=1, max_size=4),
    page=st.sampled_from([1, 5, 16]),
    left=st.sampled_from([-1, 0, 3]),
)
@settings(max_examples=15)
def test_any_batch(sequences: list[tuple[int, int]], page: int, left: int) -> None:
    """Any new tokens after any earlier ones."""
    queries = [new for new, _ in sequences]
    check(
        queries, [new + old for new, old in sequences], page=page, window_size=(left, 0 if left >= 0 else -1)
    )


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
        ({"causal": False}, "causal: expected True, got False"),
        ({"softmax_scale": None}, "softmax_scale: expected a number, got None"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected a finite number, got nan"),
        ({"softcap": "high"}, "softcap: expected a number, got 'high'"),
        ({"window_size": 5}, r"window_size: expected \(left, right\), integers, -1 for none, got 5"),
        ({"window_size": (1.5, 0)}, r"window_size: expected .*, got \(1.5, 0\)"),
        (
            {"q_descale": torch.ones(1)},
            r"q_descale: expected None, as it is not supported, got a tensor \[1\]",
        ),
        ({"output_scale": torch.ones(1)}, "output_scale: expected None"),
        (
            {"qq_bias": torch.zeros(1, 1)},
            r"qq_bias: expected None, as it is not supported, got a tensor \[1, 1\]",
        ),
        ({"mm_prefix_range": torch.zeros(1, 1, 2)}, "mm_prefix_range: expected None"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt: expected None, as it is not supported, got True"),
        ({"kv_quant_mode": 2}, "kv_quant_mode: expected None, as it is not supported, got 2"),
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


def test_quantised_caches_are_refused() -> None:
    arguments, _ = problem([1], [9])
    arguments["k"] = arguments["k"].to(torch.float8_e4m3fn)
    with pytest.raises(
        TypeError, match=r"k: expected dtype torch.float32, like q, got torch.float8_e4m3fn: quantised"
    ):
        unified_attention(**arguments)
    with pytest.raises(TypeError, match=r"q: expected dtype torch.float16, .*, got torch.float64"):
        unified_attention(**arguments | {"q": arguments["q"].double()})
