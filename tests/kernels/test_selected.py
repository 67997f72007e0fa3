"""Gradients of attention in which every query selects keys by a list of its own: blocks, or single keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from attnc.target.triton import selected
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import Subject
from tests.verify.judging import examples, subject_of_text

TEXT = """attention a {
  input q: TYPE[B, M, HEADS, 32]
  input k: TYPE[B, N, KV, 32]
  input v: TYPE[B, N, KV, DV] STORAGE
  input idx: i32[LISTS, S]FACT
  EXTRAS
  score = SCORE
  mask = MASK
  normalize = SOFTMAX
  output o: RESULT[B, M, HEADS, DV]
  LSE
  grad GRADS
}

schedule a for triton {
  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16
  backward { WAY tile.q = 16, tile.kv in {16, 32} }
}
"""
USUAL: Mapping[str, str] = {
    "TYPE": "bf16",
    "RESULT": "bf16",
    "WAY": "",
    "HEADS": "Hkv * G",
    "KV": "Hkv",
    "DV": "32",
    "STORAGE": "",
    "LISTS": "B, M, Hkv",
    "FACT": "",
    "EXTRAS": "",
    "SCORE": "dot(q, k) / 4",
    "MASK": "listed(idx, rows = 1, keys = 1)",
    "SOFTMAX": "softmax",
    "LSE": "output lse: f32[B, HEADS, M]",
    "GRADS": "q, k, v",
}
LATENT = {"HEADS": "G", "KV": "1", "DV": "16", "STORAGE": "via prefix(k)", "LISTS": "B, M", "GRADS": "q, k"}
DROPPED = {
    "EXTRAS": "input p: f32[]\n  input seed: i64[]",
    "SOFTMAX": "softmax(dropout = p, seed = seed)",
}
ATOMIC = {"WAY": "accumulate.dk = atomic, accumulate.dv = atomic,"}
CASES: Mapping[str, Mapping[str, str]] = {
    "tokens": {"MASK": "listed(idx, rows = 1, keys = 1) and causal"},
    "latent attention": LATENT,
    "blocks": {"MASK": "listed(idx, rows = 1, keys = 16) and causal"},
    "distinct": {"FACT": " is distinct", "LISTS": "B, Hkv, M"},
    "blocks of four, of three queries": {"LISTS": "B, Hkv, R", "MASK": "listed(idx, rows = 3, keys = 4)"},
    "counted": {
        "EXTRAS": "input cnt: i32[B, M, Hkv]",
        "MASK": "listed(idx, rows = 1, keys = 1, count = cnt) and window(50, 3)",
    },
    "a key head for each query head": {"HEADS": "H", "KV": "H", "LISTS": "B, M"},
    "blocks of each of them": {
        "HEADS": "H",
        "KV": "H",
        "LISTS": "B, M, H",
        "MASK": "listed(idx, rows = 1, keys = 16) and causal",
    },
    "values of other columns": {"DV": "80"},
    "a sink and a softcap": {
        "EXTRAS": "input sink: f32[Hkv * G]",
        "SOFTMAX": "softmax(sink = sink[h])",
        "SCORE": "softcap(dot(q, k) / 4, 20)",
    },
    "scores by position and head": {
        "EXTRAS": "input slope: f32[Hkv * G]\n  input bias: f32[B, N]",
        "SCORE": "dot(q, k) * (1 + bias[b, kv_idx]) + slope[h] * (kv_idx - q_pos)",
    },
    "latent attention and a softcap": {**LATENT, "SCORE": "softcap(dot(q, k) / 4, 20)"},
    "lengths": {
        "EXTRAS": "input many: i32[B]\n  input few: i32[B]\n  length N = many[b]\n  length M = few[b]",
        "MASK": "listed(idx, rows = 1, keys = 1) and causal",
    },
    "padding": {
        "EXTRAS": "input left: i32[B]",
        "MASK": "listed(idx, rows = 1, keys = 1) and kv_idx >= left[b]",
    },
    "padding under a softcap": {
        "EXTRAS": "input valid: bool[B, N]",
        "SCORE": "softcap(dot(q, k) / 4, 20)",
        "MASK": "listed(idx, rows = 1, keys = 4) and valid[b, kv_idx]",
    },
    "keys alone": {"GRADS": "k, v"},
    "queries alone": {"GRADS": "q", "LSE": ""},
    "softpick": {"SOFTMAX": "softpick"},
    "gradients in f32": {"GRADS": "q, k, v: f32"},
    "f32": {"TYPE": "f32", "RESULT": "f32"},
    "latent attention with outputs in f32": {**LATENT, "RESULT": "f32"},
    "latent attention of odd widths": {**LATENT, "DV": "20"},
    "odd widths added as they come": {**LATENT, "DV": "20", "WAY": "accumulate.dk = atomic,"},
    "added as they come": ATOMIC,
    "softpick added as it comes": {**ATOMIC, "SOFTMAX": "softpick"},
    "f32 added as it comes": {**ATOMIC, "TYPE": "f32", "RESULT": "f32"},
    "lengths added as they come": {
        **ATOMIC,
        "EXTRAS": "input many: i32[B]\n  input few: i32[B]\n  length N = many[b]\n  length M = few[b]",
        "MASK": "listed(idx, rows = 1, keys = 1) and causal",
    },
    "blocks of four added as they come": {
        **ATOMIC,
        "LISTS": "B, Hkv, R",
        "MASK": "listed(idx, rows = 3, keys = 4)",
    },
    "keys alone added as they come": {**ATOMIC, "GRADS": "k, v"},
    "outputs in f32 added as they come": {**ATOMIC, "RESULT": "f32"},
    "padding under a softcap added as it comes": {
        **ATOMIC,
        "EXTRAS": "input valid: bool[B, N]",
        "SCORE": "softcap(dot(q, k) / 4, 20)",
        "MASK": "listed(idx, rows = 1, keys = 4) and valid[b, kv_idx]",
    },
    "latent attention of several heads": {"DV": "16", "STORAGE": "via prefix(k)", "GRADS": "q, k"},
    "keys of latent attention alone": {**LATENT, "GRADS": "k"},
    "latent attention and softpick": {**LATENT, "SOFTMAX": "softpick"},
    "latent attention of lengths": {
        **LATENT,
        "EXTRAS": "input many: i32[B]\n  input few: i32[B]\n  length N = many[b]\n  length M = few[b]",
        "MASK": "listed(idx, rows = 1, keys = 1) and causal",
    },
    "latent attention added as it comes": {**LATENT, "WAY": "accumulate.dk = atomic,"},
    "dropout": {**DROPPED, "MASK": "listed(idx, rows = 1, keys = 1) and causal"},
    "dropout of blocks": {
        "EXTRAS": f"{DROPPED['EXTRAS']}\n  input first: i32[]",
        "SOFTMAX": "softmax(dropout = p, seed = seed, first_head = first)",
        "MASK": "listed(idx, rows = 1, keys = 32) and causal",
    },
    "dropout of blocks of five": {**DROPPED, "MASK": "listed(idx, rows = 1, keys = 5)"},
    "dropout of latent attention": {**LATENT, **DROPPED},
    "dropout of latent attention added as it comes": {**LATENT, **DROPPED, "WAY": "accumulate.dk = atomic,"},
    "dropout added as it comes": {**ATOMIC, **DROPPED},
    "dropout of a head alone": {
        **DROPPED,
        "HEADS": "H",
        "KV": "H",
        "LISTS": "B, M, H",
        "MASK": "listed(idx, rows = 1, keys = 16)",
    },
}
BY_DAY = (
    "tokens",
    "dropout of blocks",
    "added as they come",
    "latent attention added as it comes",
    "latent attention",
    "blocks",
    "lengths",
    "padding under a softcap",
    "queries alone",
)
SIZES = {"B": 2, "M": 5, "N": 75, "Hkv": 2, "G": 3, "R": 2, "S": 6, "H": 3}


def subject(**changes: str) -> Subject:
    words, text = {**USUAL, **changes}, TEXT
    for word in ("LSE", *(word for word in words if word != "LSE")):
        text = text.replace(word, words[word])
    return subject_of_text(text)


def wrong(made: Subject, sizes: Mapping[str, int], seeds: range) -> list[str]:
    cases = (Case(dims=sizes, seed=seed, config=seed % len(made.configs)) for seed in seeds)
    verdicts = ((case, check(made, case)) for case in cases)
    return [f"{case.to_json()}: {verdict.message}" for case, verdict in verdicts if not verdict.ok]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly]) for name in CASES],
)
def test_gradients_of_selected_keys(name: str) -> None:
    assert not wrong(subject(**CASES[name]), SIZES, range(examples(2)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["tokens", "latent attention", "added as they come"])
def test_lists_without_entries(name: str) -> None:
    assert not wrong(subject(**CASES[name]), {**SIZES, "S": 0}, range(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["", ATOMIC["WAY"]])
def test_heads_of_a_query_fill_several_tiles(way: str) -> None:
    made = subject(MASK="listed(idx, rows = 1, keys = 4)", WAY=way)
    assert not wrong(made, {**SIZES, "M": 3, "G": 35}, range(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tiles", [1, 12])
def test_queries_share_sums(monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    """Lists of six have a tile, in two sequences with two K/V heads each: one copy, or three."""
    monkeypatch.setattr(selected, "ENOUGH_TILES", tiles)
    made = subject(MASK="listed(idx, rows = 1, keys = 1) and causal")
    assert not wrong(made, {**SIZES, "M": 7}, range(2))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_weights_of_some_queries_are_kept_at_a_time(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """A launch has queries of two copies, of four, or of six; of seven, the last one has fewer."""
    monkeypatch.setattr(selected, "KEPT", queries * 2 * 16 * 256 * 2)
    monkeypatch.setattr(selected, "ENOUGH_TILES", queries)
    made = subject(**LATENT, MASK="listed(idx, rows = 1, keys = 1) and causal")
    assert not wrong(made, {**SIZES, "M": 7}, range(2))


def test_gradients_are_the_same_in_every_order_of_a_list() -> None:
    """Each key sums over the queries in their order, wherever their lists have it."""
    made = subject()
    q = torch.randn(1, 6, 4, 32, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 40, 2, 32, dtype=torch.bfloat16)
    idx = torch.rand(1, 6, 2, 40).argsort(-1)[..., :12].int()
    found: list[list[Any]] = []
    for lists in (idx, idx.flip(-1)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o, _ = made.module.a(*inputs, lists)
        o.backward(torch.ones_like(o))
        found.append([x.grad for x in inputs])
    assert all(torch.equal(*pair) for pair in zip(found[0][1:], found[1][1:], strict=True))
