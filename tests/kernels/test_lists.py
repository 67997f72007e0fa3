"""Kernels that walk over the blocks that a mask lists: whatever lists hold, beside all else that a mask, a
score and a storage can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from attnc.reference import reference
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import Subject
from tests.by_day import each_by_day
from tests.targets import EACH, skip_without_compiler
from tests.verify.judging import examples, subject_of_text

TRITON = """schedule a for triton {
  tile.q in {16, 32}, tile.kv = 16, FORWARD
  backward {
    tile.q = 16, tile.kv = 16
    BACKWARD
  }
}"""
SM80 = """schedule a for cuda.sm_80 {
  tile.kv = 16, FORWARD
  backward {
    BACKWARD
  }
}"""
#: Blocks that end with sequences, lists that queries lack, and a size that no other has.
SIZES = {"B": 1, "M": 41, "N": 108, "Hkv": 2, "G": 2, "R": 2, "S": 4}
#: Of each table those that run by day; the rest at night.
BY_DAY = (
    "nothing else",
    "a window",
    "two ranges",
    "padding",
    "in another order",
    "counted",
    "lengths",
    "pages",
    "dropout",
)


@cache
def subject(
    *,
    mask: str = "listed(idx, rows = 32, keys = 48)",
    lists: str = "idx: i32[B, Hkv, R, S]",
    extras: tuple[str, ...] = (),
    q: str = "bf16[B, M, Hkv * G, 16]",
    kv: str = "bf16[B, N, Hkv, 16]",
    score: str = "dot(q, k) / 4",
    softmax: str = "softmax",
    grads: str = "q, k, v",
    forward: str = "stages = 2",
    backward: str = "",
    on: str = TRITON,
) -> Subject:
    statements = "\n  ".join(extras)
    text = f"""attention a {{
  input q: {q}
  input k, v: {kv}
  input {lists}
  {statements}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  output o: {q.split(" via")[0]}
  {f"grad {grads}" if grads else ""}
}}
"""
    return subject_of_text(text + on.replace("FORWARD", forward).replace("BACKWARD", backward))


def wrong(made: Subject, dims: Mapping[str, int], seeds: range = range(8)) -> Iterator[str]:
    """Yields what is wrong with results and gradients in cases of these sizes, with lists of every style."""
    for seed in seeds:
        case = Case(dims=dims, seed=seed, config=seed % len(made.configs))
        verdict = check(made, case)
        if not verdict.ok:
            yield f"{case.to_json()}: {verdict.message}"


MASKS: Mapping[str, Any] = {
    "nothing else": {},
    "causal": {"mask": "listed(idx, rows = 32, keys = 48) and causal"},
    "a window": {"mask": "window(40, 8) and listed(idx, rows = 32, keys = 48)"},
    "documents": {
        "mask": "listed(idx, rows = 32, keys = 48) and doc[b, q_pos] == doc[b, kv_idx]",
        "extras": ("input doc: i32[B, N] is sorted",),
    },
    "two ranges": {"mask": "listed(idx, rows = 32, keys = 48) and (kv_idx < 10 or window(20, 0))"},
    "the middle of a tile": {"mask": "listed(idx, rows = 32, keys = 48) and kv_idx >= 52"},
    "the start of a tile": {"mask": "listed(idx, rows = 32, keys = 48) and kv_idx // 16 >= 3"},
    "late queries": {"mask": "listed(idx, rows = 32, keys = 48) and q_idx >= 32"},
    "padding": {
        "mask": "listed(idx, rows = 32, keys = 48) and kv_idx >= left[b]",
        "extras": ("input left: i32[B]",),
    },
    "never": {"mask": "listed(idx, rows = 32, keys = 48) and kv_idx > q_pos + N"},
    "elements": {
        "mask": "listed(idx, rows = 32, keys = 48) and keep[b, q_idx, kv_idx]",
        "extras": ("input keep: bool[B, M, N]",),
    },
}
LISTS: Mapping[str, Any] = {
    "one for all sequences and heads": {
        "lists": "idx: i32[R, S]",
        "mask": "listed(idx, rows = 32, keys = 48)",
    },
    "of query heads": {"lists": "idx: i32[B, Hkv * G, R, S]"},
    "in another order": {"lists": "idx: i32[R, Hkv, B, S]"},
    "of 64 bits": {"lists": "idx: i64[B, 1, R, S]"},
    "counted": {
        "extras": ("input cnt: i32[B, Hkv, R]",),
        "mask": "listed(idx, rows = 32, keys = 48, count = cnt)",
    },
    "counted at once": {
        "extras": ("input top: i32[]",),
        "mask": "listed(idx, rows = 32, keys = 48, count = top)",
    },
    "of the first three": {"mask": "listed(idx, rows = 32, keys = 48, count = 3)"},
    "distinct": {"lists": "idx: i32[B, Hkv, R, S] is distinct"},
    "with indices": {"mask": "listed(idx[b, h // G, q_idx // 32], keys = 48)"},
    "of other heads": {"mask": "listed(idx[b, h % 3, q_idx // 32], keys = 48)"},
    "of blocks of 16": {"mask": "listed(idx, rows = 32, keys = 16)"},
    "of blocks of 128": {"mask": "listed(idx, rows = 32, keys = 128)"},
}
BESIDE: Mapping[str, Any] = {
    "a bias": {
        "extras": ("input bias: f32[B, Hkv * G, M, N]",),
        "score": "dot(q, k) / 4 + bias[b, h, q_idx, kv_idx]",
        "grads": "q, k, v, bias",
    },
    "a slope": {
        "extras": ("input slope: f32[Hkv * G]",),
        "score": "dot(q, k) / 4 + slope[h] * (kv_idx - q_pos)",
        "grads": "q, k, v, slope",
    },
    "a bias of keys": {
        "extras": ("input bias: f32[B, N]",),
        "score": "dot(q, k) / 4 + bias[b, kv_idx]",
        "grads": "q, k, v, bias",
    },
    "a sink": {"extras": ("input sink: f32[Hkv * G]",), "softmax": "softmax(sink = sink[h])"},
    "dropout": {
        "extras": ("input p: f32[]", "input seed: i64[]"),
        "softmax": "softmax(dropout = p, seed = seed)",
    },
    "lengths": {
        "extras": ("input many: i32[B]", "input few: i32[B]", "length N = many[b]", "length M = few[b]"),
        "mask": "listed(idx, rows = 32, keys = 48) and causal",
    },
    "packed sequences": {
        "q": "bf16[T, Hkv * G, 16] via ragged(cu)",
        "kv": "bf16[U, Hkv, 16] via ragged(ck)",
        "extras": ("input cu: i32[B + 1]", "input ck: i32[B + 1]"),
        "mask": "listed(idx, rows = 32, keys = 48) and causal",
    },
    "pages": {
        "kv": "bf16[B, N, Hkv, 16] via paged(table, page = 8)",
        "extras": ("input table: i32[B, P]", "input many: i32[B]", "length N = many[b]"),
        "mask": "listed(idx, rows = 32, keys = 48) and causal",
        "grads": "",
    },
    "a first pass": {"forward": "softmax = two_pass"},
    "a rescaled o": {"forward": "softmax = online(rescale = every_step)"},
    "persistent programs": {"forward": "persistent = true"},
    "dq in memory": {"backward": "accumulate.dq = atomic"},
    "dq in order": {"backward": "accumulate.dq = sequential"},
    "the longest first": {"forward": "order = longest_first"},
    "f32": {"q": "f32[B, M, Hkv * G, 16]", "kv": "f32[B, N, Hkv, 16]"},
}


def by_day(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly]) for name in names]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", by_day(MASKS))
def test_masks_beside_lists(name: str) -> None:
    assert not list(wrong(subject(**MASKS[name]), SIZES, range(examples(1))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", by_day(LISTS))
def test_lists_of_all_shapes(name: str) -> None:
    assert not list(wrong(subject(**LISTS[name]), SIZES, range(examples(1))))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", by_day(BESIDE))
def test_what_else_stands_beside_lists(name: str) -> None:
    assert not list(wrong(subject(**BESIDE[name]), SIZES, range(examples(1))))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [*MASKS, *LISTS, *BESIDE])
def test_bits_of_lists_on_sm80(name: str) -> None:
    skip_without_compiler("cuda.sm_80")
    made = subject(**{**MASKS, **LISTS, **BESIDE}[name], on=SM80)
    assert not list(wrong(made, SIZES, range(2, 2 + examples(1))))


ONE_QUERY = """attention a {
  input q: bf16[B, M, HEADS, 16]
  input k, v: bf16[B, N, KV, 16] STORAGE
  input idx: i32[LISTS, S]FACT
  score = dot(q, k) / 4
  mask = MASK
  normalize = softmax
  output o: bf16[B, M, HEADS, 16]
}

schedule a for TARGET {
  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16
}
"""
QUERIES: Mapping[str, Mapping[str, str]] = {
    "each": {"LISTS": "B, M, Hkv", "MASK": "listed(idx, rows = 1, keys = 32) and causal"},
    "three": {"LISTS": "B, Hkv, R", "MASK": "listed(idx, rows = 3, keys = 16)"},
    "all": {"LISTS": "B, Hkv", "MASK": "listed(idx, keys = 32) and window(30, 0)"},
    "of one K/V head": {"HEADS": "G", "KV": "1", "LISTS": "B, M", "MASK": "listed(idx, rows = 1, keys = 16)"},
    "of tokens": {"LISTS": "B, M, Hkv", "MASK": "listed(idx, rows = 1, keys = 1) and causal"},
    "of distinct tokens": {
        "LISTS": "B, M",
        "MASK": "listed(idx, rows = 1, keys = 1)",
        "FACT": " is distinct",
    },
    "of four tokens": {"LISTS": "B, Hkv, R", "MASK": "listed(idx, rows = 2, keys = 4) and window(50, 3)"},
    "of tokens in pages": {
        "LISTS": "B, M, Hkv",
        "MASK": "listed(idx, rows = 1, keys = 1) and causal",
        "STORAGE": (
            "via paged(table, page = 16)\n  input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]"
        ),
    },
    "in pages": {
        "LISTS": "B, M, Hkv",
        "MASK": "listed(idx, rows = 1, keys = 32) and causal",
        "STORAGE": (
            "via paged(table, page = 16)\n  input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]"
        ),
    },
}


def subject_of_queries(name: str, target: str = "triton") -> Subject:
    text = ONE_QUERY.replace("TARGET", target)
    for word, value in (
        {"HEADS": "Hkv * G", "KV": "Hkv", "STORAGE": "", "FACT": "", **QUERIES[name]}
    ).items():
        text = text.replace(word, value)
    return subject_of_text(text)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", QUERIES)
def test_lists_of_few_queries(name: str) -> None:
    sizes = {"B": 2, "M": 5, "N": 75, "Hkv": 2, "G": 3, "R": 2, "S": 4, "P": 5}
    assert not list(wrong(subject_of_queries(name), sizes, range(examples(2))))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in QUERIES if "tokens" not in name])
def test_lists_of_few_queries_on_sm80(name: str) -> None:
    skip_without_compiler("cuda.sm_80")
    sizes = {"B": 2, "M": 5, "N": 75, "Hkv": 2, "G": 3, "R": 2, "S": 4, "P": 5}
    assert not list(wrong(subject_of_queries(name, "cuda.sm_80"), sizes, range(examples(2))))


@pytest.mark.parametrize("target", EACH)
def test_heads_of_a_query_fill_several_tiles(target: str) -> None:
    skip_without_compiler(target)
    sizes = {"B": 2, "M": 3, "N": 40, "Hkv": 2, "G": 19, "S": 2}
    assert not list(wrong(subject_of_queries("each", target), sizes, range(2)))


def test_no_more_rows_of_lists_are_inverted_than_packed_sequences_have() -> None:
    """Else the position of a row of the lists could pass 32 bits."""
    sizes = subject(**BESIDE["packed sequences"]).module.CALL.sizes
    assert sizes["list_rows"] == "min(R, (T + 31) // 32)"


def test_keys_that_no_list_names_may_be_anything() -> None:
    """NaN in rows that no kernel loads."""
    made = subject()
    q, k, v = torch.randn(1, 32, 2, 16), torch.randn(1, 144, 1, 16), torch.randn(1, 144, 1, 16)
    k[:, 48:96], v[:, 48:96] = torch.nan, torch.nan
    idx = torch.tensor([2, 0, -1, 2], dtype=torch.int32).reshape(1, 1, 1, 4)
    inputs = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "idx": idx}
    expected = reference(made.variant.attention, inputs)["o"]
    assert np.isfinite(expected).all()
    kept = torch.cat([torch.arange(48), torch.arange(96, 144)])
    s = torch.einsum("bmhd,bnkd->bhmn", inputs["q"].double(), inputs["k"].double()[:, kept]) / 4
    o = torch.einsum("bhmn,bnkd->bmhd", s.softmax(-1), inputs["v"].double()[:, kept])
    np.testing.assert_allclose(expected, o.numpy(), atol=1e-12)


def test_lists_that_changed_since_are_an_error_of_autograd() -> None:
    made = subject()
    q = torch.randn(1, 32, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.randn(2, 1, 96, 1, 16, dtype=torch.bfloat16)
    idx = torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    o = made.module.a(q, k, v, idx)
    idx += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


HOPPER = """attention a {
  input q: bf16[Q]
  input k, v: bf16[KV]
  input idx: i32[B, Hkv, R, S]
  EXTRAS
  score = SCORE
  mask = MASK
  normalize = SOFTMAX
  output o: bf16[Q_AS_IS]
  GRADS
}

schedule a for cuda.sm_90a {
  SCHEDULE
}
"""
ON_HOPPER: Mapping[str, Mapping[str, str]] = {
    "gradients": {"MASK": "listed(idx, rows = 128, keys = 128) and causal", "GRADS": "grad q, k, v"},
    "a causal mask": {"MASK": "listed(idx, rows = 128, keys = 64) and causal"},
    "nothing else": {"SCHEDULE": "consumers = 2, tile.kv = 32, stages = 2"},
    "a warpgroup a block": {"MASK": "listed(idx, rows = 64, keys = 64) and causal", "SCHEDULE": "stages = 2"},
    "lists of 192 queries": {"MASK": "listed(idx, rows = 192, keys = 48)", "SCHEDULE": "consumers in {1, 3}"},
    "a window": {"MASK": "window(90, 10) and listed(idx, rows = 128, keys = 96)", "SCHEDULE": "tile.kv = 32"},
    "two ranges": {"MASK": "listed(idx, rows = 128, keys = 64) and (kv_idx < 40 or window(70, 0))"},
    "padding": {
        "MASK": "listed(idx, rows = 128, keys = 64) and kv_idx >= left[b]",
        "EXTRAS": "input left: i32[B]",
    },
    "dropout": {
        "EXTRAS": "input p: f32[]\n  input seed: i64[]",
        "SOFTMAX": "softmax(dropout = p, seed = seed)",
    },
    "a bias of keys": {"EXTRAS": "input w: f32[B, N]", "SCORE": "dot(q, k) / 8 * w[b, kv_idx]"},
    "a bias of pairs": {
        "EXTRAS": "input w: bf16[B, Hkv * G, M, N]",
        "SCORE": "dot(q, k) / 8 + w[b, h, q_idx, kv_idx]",
    },
    "a sink": {"EXTRAS": "input sink: f32[Hkv * G]", "SOFTMAX": "softmax(sink = sink[h])"},
    "packed sequences": {
        "Q": "T, Hkv * G, 64] via ragged(cu",
        "KV": "U, Hkv, 64] via ragged(ck",
        "EXTRAS": "input cu: i32[B + 1]\n  input ck: i32[B + 1]",
        "MASK": "listed(idx, rows = 128, keys = 64) and causal",
    },
    "gradients without a mask": {
        "MASK": "listed(idx, rows = 128, keys = 128)",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "backward { dq { stages = 3 } }",
    },
    "gradients beside dropout": {
        "EXTRAS": "input p: f32[]\n  input seed: i64[]",
        "SOFTMAX": "softmax(dropout = p, seed = seed)",
        "MASK": "listed(idx, rows = 256, keys = 128) and window(140, 20)",
        "GRADS": "grad q, k, v",
    },
    "gradients of packed sequences": {
        "Q": "T, Hkv * G, 64] via ragged(cu",
        "KV": "U, Hkv, 64] via ragged(ck",
        "EXTRAS": "input cu: i32[B + 1]\n  input ck: i32[B + 1]",
        "MASK": "listed(idx, rows = 128, keys = 128) and causal",
        "GRADS": "grad q, k, v",
    },
    "gradients of a warpgroup a block": {
        "MASK": "listed(idx, rows = 64, keys = 64) and causal",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "",
    },
    "gradients of a warpgroup a block of queries": {
        "MASK": "listed(idx, rows = 64, keys = 128) and window(90, 30)",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "",
    },
    "gradients of a warpgroup a block of keys": {
        "MASK": "listed(idx, rows = 128, keys = 192)",
        "GRADS": "grad q, k, v",
        "EXTRAS": "input p: f32[]\n  input seed: i64[]",
        "SOFTMAX": "softmax(dropout = p, seed = seed)",
        "SCHEDULE": "",
    },
    "gradients of a warpgroup a block, packed": {
        "Q": "T, Hkv * G, 128] via ragged(cu",
        "KV": "U, Hkv, 128] via ragged(ck",
        "EXTRAS": "input cu: i32[B + 1]\n  input ck: i32[B + 1]",
        "MASK": "listed(idx, rows = 64, keys = 64) and causal",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "",
    },
    "gradients of keys": {"MASK": "listed(idx, rows = 128, keys = 128)", "GRADS": "grad k, v"},
    "dq of 64 queries as it comes": {
        "Q": "B, M, Hkv * G, 128",
        "KV": "B, N, Hkv, 128",
        "MASK": "listed(idx, rows = 64, keys = 256)",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "backward { accumulate.dq = atomic }",
    },
    "dq as it comes, of packed sequences": {
        "Q": "T, Hkv * G, 64] via ragged(cu",
        "KV": "U, Hkv, 64] via ragged(ck",
        "EXTRAS": "input cu: i32[B + 1]\n  input ck: i32[B + 1]",
        "MASK": "listed(idx, rows = 128, keys = 128)",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "backward { accumulate.dq = atomic }",
    },
    "dq as it comes": {
        "MASK": "listed(idx, rows = 128, keys = 128) and causal",
        "GRADS": "grad q, k, v",
        "SCHEDULE": "backward { accumulate.dq = atomic }",
    },
    "pages": {
        "KV": "B, N, Hkv, 64] via paged(table, page = 16",
        "EXTRAS": "input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]",
    },
}


TOKENS = """attention a {
  input q: bf16[B, M, HEADS, 64]
  input k, v: bf16[B, N, KV, 64]
  input idx: i32[LISTS, S]
  EXTRAS
  score = dot(q, k) / 8
  mask = MASK
  normalize = SOFTMAX
  output o: bf16[B, M, HEADS, 64]
  output lse: f32[B, HEADS, M]
}

schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa, SCHEDULE
}
"""
TOKENS_ON_HOPPER: Mapping[str, Mapping[str, str]] = {
    "of each query": {"EXTRAS": "input sink: f32[Hkv * G]", "SOFTMAX": "softmax(sink = sink[h])"},
    "in splits": {"SCHEDULE": "split.kv in {auto, 3}"},
    "of one K/V head": {"HEADS": "G", "KV": "1", "LISTS": "B, M"},
    "of three queries": {
        "LISTS": "B, Hkv, R",
        "EXTRAS": "input cnt: i32[B, Hkv, R]",
        "MASK": "listed(idx, rows = 3, keys = 1, count = cnt)",
    },
    "of all queries": {"LISTS": "Hkv", "MASK": "listed(idx, keys = 1)"},
    "of 64 bits": {"LISTS": "B, M, Hkv", "SCHEDULE": "tile.kv = 32, stages = 3"},
}


def subject_of_tokens(**changes: str) -> Subject:
    usual = {
        "HEADS": "Hkv * G",
        "KV": "Hkv",
        "LISTS": "B, Hkv, M",
        "EXTRAS": "",
        "MASK": "listed(idx, rows = 1, keys = 1)",
        "SOFTMAX": "softmax",
        "SCHEDULE": "stages = 2",
    }
    text = TOKENS
    for word, value in {**usual, **changes}.items():
        text = text.replace(word, value)
    return subject_of_text(text)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if i < 2 else [pytest.mark.nightly]) for i, x in enumerate(TOKENS_ON_HOPPER)],
)
def test_keys_of_lists_on_hopper(name: str) -> None:
    skip_without_compiler("cuda.sm_90a")
    sizes = {"B": 2, "M": 5, "N": 190, "Hkv": 2, "G": 3, "R": 1, "S": 120}
    made = subject_of_tokens(**TOKENS_ON_HOPPER[name], **({"idx: i32": "idx: i64"} if "64" in name else {}))
    assert not list(wrong(made, sizes, range(1, 1 + examples(2))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keys", [2100, 98_500])
def test_keys_of_a_list_are_in_words_of_several_warps_and_passes(keys: int) -> None:
    """A thread has a word of 32 keys, or several; a pass over the bits has 98,304 keys."""
    skip_without_compiler("cuda.sm_90a")
    made = subject_of_tokens(HEADS="G", KV="1", LISTS="B, M")
    assert not list(wrong(made, {"B": 1, "M": 2, "N": keys, "G": 2, "S": 150}, range(1, 3)))


def test_heads_of_a_query_fill_two_tiles_on_hopper() -> None:
    skip_without_compiler("cuda.sm_90a")
    made = subject_of_tokens(HEADS="G", KV="1", LISTS="M")
    assert not list(wrong(made, {"B": 2, "M": 2, "N": 70, "G": 67, "S": 90}, range(1, 3)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[] if i < 4 and i != 2 else [pytest.mark.nightly])
        for i, x in enumerate(ON_HOPPER)
    ],
)
def test_bits_of_lists_on_hopper(name: str) -> None:
    skip_without_compiler("cuda.sm_90a")
    usual = {
        "Q": "B, M, Hkv * G, 64",
        "KV": "B, N, Hkv, 64",
        "EXTRAS": "",
        "SCORE": "dot(q, k) / 8",
        "MASK": "listed(idx, rows = 128, keys = 64)",
        "SOFTMAX": "softmax",
        "SCHEDULE": "softmax = online(maximum = lazy(12)), tile.kv = 64",
        "GRADS": "",
        **ON_HOPPER[name],
    }
    text = HOPPER.replace("Q_AS_IS", usual["Q"].split("]")[0])
    for word in ("EXTRAS", "SCORE", "MASK", "SOFTMAX", "SCHEDULE", "GRADS"):
        text = text.replace(word, usual[word])
    for word in ("KV", "Q"):
        closed = "]" if "via" not in usual[word] else ")"
        text = text.replace(f"[{word}]", f"[{usual[word]}{closed}")
    sizes = {"B": 2, "M": 150, "N": 333, "Hkv": 1, "G": 2, "R": 2, "S": 4}
    assert not list(wrong(subject_of_text(text), sizes, range(2, 2 + examples(1))))


CUT_OFF = """attention a {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  input idx: i32[B, M, S]
  input queries: i32[B]
  length M = queries[b]
  score = dot(q, k) / 8
  mask = LIST and causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
  GRADS
}

schedule a for TARGET {
  loops = LOOPS
}
"""
OF_TOKENS = {"LIST": "listed(idx, rows = 1, keys = 1)", "TARGET": "triton", "LOOPS": "[kv], pack = gqa"}
SHORTENED: Mapping[str, Mapping[str, str]] = {
    "tokens": {**OF_TOKENS, "GRADS": "grad q, k, v"},
    "blocks of single queries": {
        **OF_TOKENS,
        "LIST": "listed(idx, rows = 1, keys = 16)",
        "GRADS": "grad q, k, v",
    },
    "blocks": {
        "LIST": "listed(idx[b, q_idx // 16], keys = 16)",
        "TARGET": "triton",
        "LOOPS": "[q, kv], tile.q = 16, tile.kv = 16",
        "GRADS": "",
    },
    "bits": {
        "LIST": "listed(idx[b, q_idx // 64], keys = 64)",
        "TARGET": "cuda.sm_90a",
        "LOOPS": "[q, kv]",
        "GRADS": "",
    },
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", each_by_day(SHORTENED, of=2))
def test_lists_are_of_all_queries_though_a_length_cuts_some_off(name: str) -> None:
    """Lists lie M apart, the size of the tensor, which kernels call the queries of a sequence."""
    text = CUT_OFF
    for word, value in SHORTENED[name].items():
        text = text.replace(word, value)
    skip_without_compiler(SHORTENED[name]["TARGET"])
    dims = {"B": 3, "M": 70 if name == "bits" else 20, "N": 90, "Hkv": 1, "G": 2, "S": 4}
    assert not list(wrong(subject_of_text(text), dims, range(1, 4)))
