"""Queries of few heads that share tiles over the union of their lists: each sees its own keys alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attnc.verify.subject import Subject
from tests.kernels.test_lists import wrong
from tests.targets import skip_without_compiler
from tests.verify.judging import examples, subject_of_text

TEXT = """attention a {
  input q: ELEMENT[QUERIES, HEADS, 64] Q_STORAGE
  input k: ELEMENT[KEYS, KV, 64] K_STORAGE
  input v: ELEMENT[KEYS, KV, WIDTH] V_STORAGE
  input idx: i32[LISTS, S]
  EXTRAS
  score = dot(q, k) / 8
  mask = MASK
  normalize = SOFTMAX
  output o: ELEMENT[QUERIES, HEADS, WIDTH]
  output lse: f32[LSE]
}

schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa, lists = union, SCHEDULE
}
"""
USUAL = {
    "ELEMENT": "bf16",
    "QUERIES": "B, M",
    "KEYS": "B, N",
    "LSE": "B, HEADS, M",
    "Q_STORAGE": "",
    "HEADS": "16",
    "KV": "1",
    "WIDTH": "64",
    "K_STORAGE": "",
    "V_STORAGE": "",
    "LISTS": "B, M",
    "EXTRAS": "",
    "MASK": "listed(idx, rows = 1, keys = 1)",
    "SOFTMAX": "softmax",
    "SCHEDULE": "stages = 2",
}
PACKED = {"QUERIES": "T", "Q_STORAGE": "via ragged(cu)", "LISTS": "T", "LSE": "T, HEADS"}
PAGES = "via paged(table, page = 16)"
CASES: Mapping[str, Mapping[str, str]] = {
    "four queries a tile": {},
    "of three heads of several keys, in splits": {
        "HEADS": "6",
        "KV": "2",
        "LISTS": "B, 2, M",
        "SCHEDULE": "split.kv in {auto, 3}",
    },
    "two queries of twenty heads, beside a mask and a sink": {
        "HEADS": "20",
        "EXTRAS": "input sink: f32[20]\n  input doc: i32[B, N]",
        "MASK": "listed(idx, rows = 1, keys = 1) and causal and doc[b, q_pos] == doc[b, kv_idx]",
        "SOFTMAX": "softmax(sink = sink[h])",
        "ELEMENT": "f16",
    },
    "over pages, by a count and an element of each query": {
        "HEADS": "16",
        "KV": "2",
        "K_STORAGE": PAGES,
        "V_STORAGE": PAGES,
        "LISTS": "M",
        "EXTRAS": "input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]\n  input cnt: i64[M]\n"
        "  input see: bool[B, 2, M, N]",
        "MASK": "listed(idx, rows = 1, keys = 1, count = cnt) and see[b, h // 8, q_idx, kv_idx]",
        "SCHEDULE": "split.kv = auto",
    },
    "two warpgroups share the columns of values that are in the keys": {
        "HEADS": "8",
        "WIDTH": "64",
        "V_STORAGE": "via prefix(k)",
        "SCHEDULE": "tile.kv = 32",
    },
    "packed queries over pages": {
        **PACKED,
        "HEADS": "8",
        "K_STORAGE": PAGES,
        "V_STORAGE": PAGES,
        "EXTRAS": "input cu: i32[B + 1]\n  input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]\n"
        "  input cnt: i32[T]",
        "MASK": "listed(idx, rows = 1, keys = 1, count = cnt) and causal",
        "SCHEDULE": "split.kv in {auto, 2}",
    },
    "packed sequences of several K/V heads": {
        **PACKED,
        "HEADS": "12",
        "KV": "2",
        "KEYS": "U",
        "K_STORAGE": "via ragged(ck)",
        "V_STORAGE": "via ragged(ck)",
        "LISTS": "T, 2",
        "EXTRAS": "input cu: i32[B + 1]\n  input ck: i32[B + 1]",
        "MASK": "listed(idx, rows = 1, keys = 1) and window(60, 5)",
    },
    "packed queries over rows of a batch": {
        **PACKED,
        "EXTRAS": "input cu: i32[B + 1]\n  input n: i32[B]\n  length N = n[b]",
    },
    "of blocks, four queries a tile, beside a mask": {
        "MASK": "listed(idx, rows = 1, keys = 16) and causal",
        "HEADS": "32",
        "KV": "2",
        "LISTS": "B, 2, M",
    },
    "of blocks of two tiles, two warpgroups of twenty heads, beside a sink": {
        "EXTRAS": "input sink: f32[20]\n  input cnt: i64[B, M]",
        "MASK": "listed(idx, rows = 1, keys = 64, count = cnt) and window(100, 9)",
        "SOFTMAX": "softmax(sink = sink[h])",
        "HEADS": "20",
        "WIDTH": "64",
        "V_STORAGE": "via prefix(k)",
        "SCHEDULE": "tile.kv = 32",
        "ELEMENT": "f16",
    },
    "of blocks in pages, with lengths, in splits, of three heads": {
        "HEADS": "6",
        "KV": "2",
        "K_STORAGE": PAGES,
        "V_STORAGE": PAGES,
        "EXTRAS": "input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]\n  input see: bool[B, N]",
        "MASK": "listed(idx, rows = 1, keys = 32) and see[b, kv_idx]",
        "SCHEDULE": "split.kv in {auto, 3}",
    },
    "of blocks of packed queries over pages, two K/V heads": {
        **PACKED,
        "HEADS": "12",
        "KV": "2",
        "K_STORAGE": PAGES,
        "V_STORAGE": PAGES,
        "LISTS": "T, 2",
        "EXTRAS": "input cu: i32[B + 1]\n  input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]\n"
        "  input cnt: i32[T, 2]",
        "MASK": "listed(idx, rows = 1, keys = 32, count = cnt) and causal",
        "SCHEDULE": "split.kv in {auto, 3}, overlap = true",
    },
    "of blocks of packed queries, whose lists have rows of their own": {
        **PACKED,
        "EXTRAS": "input cu: i32[B + 1]\n  input n: i32[B]\n  length N = n[b]",
        "LISTS": "R",
        "MASK": "listed(idx[cu[b] + q_idx], keys = 16) and causal",
    },
    "of blocks, one list of each query for all sequences and heads": {
        "HEADS": "12",
        "KV": "2",
        "LISTS": "1, 1, M",
        "MASK": "listed(idx, rows = 1, keys = 32) and window(100, 20)",
        "SCHEDULE": "split.kv = 2, overlap = true",
    },
    "of blocks of packed sequences, beside a sink": {
        **PACKED,
        "KEYS": "U",
        "K_STORAGE": "via ragged(ck)",
        "V_STORAGE": "via ragged(ck)",
        "EXTRAS": "input cu: i32[B + 1]\n  input ck: i32[B + 1]\n  input sink: f32[16]",
        "MASK": "listed(idx, rows = 1, keys = 16) and causal",
        "SOFTMAX": "softmax(sink = sink[h])",
    },
    "of blocks, p v of a tile beside the softmax of the next": {
        "MASK": "listed(idx, rows = 1, keys = 16) and causal",
        "SCHEDULE": "overlap = true",
    },
    "of blocks of packed keys, one list for all heads, and softpick": {
        "KEYS": "U",
        "K_STORAGE": "via ragged(ck)",
        "V_STORAGE": "via ragged(ck)",
        "EXTRAS": "input ck: i32[B + 1]",
        "MASK": "listed(idx, rows = 1, keys = 16)",
        "SOFTMAX": "softpick",
    },
    "softpick": {
        "MASK": "listed(idx, rows = 1, keys = 1) and kv_idx % 3 != 1",
        "SOFTMAX": "softpick",
    },
}


def subject(**changes: str) -> Subject:
    text = TEXT
    for _ in range(2):  # words of words
        for word, value in {**USUAL, **changes}.items():
            text = text.replace(word, value)
    return subject_of_text(text)


SIZES = {"B": 2, "M": 11, "N": 190, "R": 5, "S": 60, "P": 9, "T": 21, "U": 300}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if i < 4 else [pytest.mark.nightly]) for i, x in enumerate(CASES)],
)
def test_queries_see_the_keys_of_their_own_lists(name: str) -> None:
    skip_without_compiler("cuda.sm_90a")
    assert not list(wrong(subject(**CASES[name]), SIZES, range(1, 1 + examples(2))))


@pytest.mark.nightly
@pytest.mark.parametrize("keys", [1700, 17_000])
def test_splits_share_blocks_of_more_words_than_a_warp_has_lanes(keys: int) -> None:
    """A lane has a word of 32 blocks at a time."""
    skip_without_compiler("cuda.sm_90a")
    made = subject(
        HEADS="16",
        MASK="listed(idx, rows = 1, keys = 16) and window(WINDOW, 5)".replace("WINDOW", str(keys - 900)),
        SCHEDULE="split.kv = 3",
    )
    assert not list(wrong(made, {"B": 1, "M": 6, "N": keys, "S": 90}, range(1, 3)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keys", [1700, 17_000])
def test_keys_of_several_words_of_a_thread_and_of_several_passes(keys: int) -> None:
    """A thread has words of four keys; with 128 threads a pass has 16,384."""
    skip_without_compiler("cuda.sm_90a")
    made = subject(HEADS="8")
    assert not list(wrong(made, {"B": 1, "M": 9, "N": keys, "S": 150}, range(1, 3)))
