"""Gradients of sequences that are packed, or shorter than their tensors."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.reference_gradients import gradients
from attnc.verify.case import Case
from attnc.verify.properties import violations
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject
from tests.by_day import each_by_day
from tests.verify.judging import assert_within_bound, every_fill, subject_of_text

PACKED = "[T, Hkv * G, 16] via ragged(cu_q)", "[S, Hkv, 16] via ragged(cu_k)", "cu_q, cu_k: i32[B + 1]"
SELF = "[T, Hkv * G, 16] via ragged(cu)", "[T, Hkv, 16] via ragged(cu)", "cu: i32[B + 1]"
QUERIES = "[T, Hkv * G, 16] via ragged(cu_q)", "[B, N, Hkv, 16]", "cu_q: i32[B + 1]"
KEYS = "[B, M, Hkv * G, 16]", "[S, Hkv, 16] via ragged(cu_k)", "cu_k: i32[B + 1]"
PLAIN = "[B, M, Hkv * G, 16]", "[B, N, Hkv, 16]", "unused: i32[B]"
DIMS = {"B": 3, "M": 37, "N": 50, "Hkv": 1, "G": 2}
TRITON = """schedule a for triton {
  tile.q = 16, tile.kv = 32
  backward {
    tile.q in {16, 32}, tile.kv = 16
    WAYS
  }
}"""


@cache
def subject(
    storage: tuple[str, str, str] = PACKED,
    *,
    grads: str = "q, k, v",
    extras: str = "",
    score: str = "dot(q, k) / 4",
    mask: str = "causal",
    softmax: str = "softmax",
    lse: bool = True,
    backward: str = "",
    heads: str = "Hkv * G",
    schedule: str = TRITON,
) -> Subject:
    q, kv, cu = (text.replace("Hkv * G", heads) for text in storage)
    kv = kv if heads == "Hkv * G" else kv.replace("Hkv", heads)
    o = q.split(" via")[0]
    text = f"""attention a {{
  input q: f16{q}
  input k, v: f16{kv}
  input {cu}
  {extras}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  output o: f16{o}
  {"output lse: f32" + o.replace(", 16]", "]") if lse else ""}
  grad {grads}
}}
{schedule.replace("WAYS", backward)}
"""
    return subject_of_text(text)


def case(made: Subject, seed: int, **changes: int) -> Case:
    sizes = {"H": 2, **DIMS, **changes}
    return Case(dims={name: sizes[name] for name in free_dims(made.variant.attention)}, seed=seed)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("storage", [PACKED, SELF, QUERIES, KEYS], ids=["two", "self", "queries", "keys"])
@pytest.mark.parametrize("seed", range(2))
def test_every_storage(storage: tuple[str, str, str], seed: int) -> None:
    made = subject(storage)
    assert_within_bound(made, case(made, seed), fills=every_fill())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("storage", [PACKED, SELF, QUERIES, KEYS], ids=["two", "self", "queries", "keys"])
def test_properties(storage: tuple[str, str, str]) -> None:
    made = subject(storage)
    assert list(violations(made, case(made, 2))) == []


FEATURES = {
    ", ".join(f"{value}"[:24] for value in spec.values()): spec
    for spec in (
        {"mask": "true"},
        {"mask": "window(9, 4)"},
        {"mask": "chunk(16) or first(3)"},
        {"lse": False},
        {"heads": "H"},
        {"grads": "k, v"},
        {"grads": "q"},
        {
            "softmax": "softmax(sink = sink[h])",
            "extras": "input sink: f32[Hkv * G]",
            "grads": "q, k, v, sink",
        },
        {
            "softmax": "softmax(dropout = p, seed = seed)",
            "extras": "input p: f32[]\n  input seed: i64[]",
        },
        {"score": "softcap(dot(q, k) / 4, 2)"},
        {
            "score": "dot(q, k) / 4 - slope[h] * abs(q_pos - kv_idx) * 0.1",
            "extras": "input slope: f32[Hkv * G]",
            "grads": "q, k, v, slope",
        },
        {
            "score": "dot(q, k) / 4 + rel[h, q_pos - kv_idx + 7] * w",
            "extras": "input rel: f32[Hkv * G, R]\n  input w: f32[]",
            "grads": "q, k, v, rel, w",
        },
        {"extras": "input kv_len: i32[B]\n  length N = kv_len[b]"},
        {"extras": "input q_len: i32[B]\n  length M = q_len[b]"},
    )
}


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize("feature", each_by_day(FEATURES, of=2))
def test_every_feature(feature: str) -> None:
    made = subject(**FEATURES[feature])
    assert_within_bound(made, case(made, 3, R=15), fills=("nan",))


LENGTHS = {
    "keys": {"extras": "input kv_len: i32[B]\n  length N = kv_len[b]"},
    "queries": {"extras": "input q_len: i32[B]\n  length M = q_len[b]", "heads": "H"},
    "column": {
        "extras": "input kv_len: i32[B]\n  input column: f32[N]\n  length N = kv_len[b]",
        "score": "dot(q, k) / 4 + column[kv_idx]",
        "grads": "q, k, v, column",
        "heads": "H",
    },
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_of_ordinary_tensors(lengths: str) -> None:
    made = subject(PLAIN, **LENGTHS[lengths])
    assert_within_bound(made, case(made, 3), fills=("nan",))
    assert list(violations(made, case(made, 0))) == []


def test_sums_of_tiles_past_a_length_are_zero() -> None:
    """A program that takes the tiles of keys in turn ends with its sequence's last."""
    extras = "input kv_len: i32[B]\n  input slope: f32[H]\n  length N = kv_len[b]"
    made = subject(
        PLAIN,
        extras=extras,
        score="dot(q, k) / 4 + slope[h] * kv_idx",
        grads="q, k, v, slope",
        heads="H",
        backward="accumulate.dq = sequential",
    )
    assert_within_bound(made, case(made, 3), fills=("nan",))


def test_the_reference_takes_sequences_one_by_one() -> None:
    packed, plain = (subject(storage).variant.attention for storage in (SELF, PLAIN))
    make = np.random.default_rng(0)
    ends, heads = (0, 7, 7, 12), {"q": 2, "k": 1, "v": 1}
    tensors = {name: make.standard_normal((14, count, 16)) for name, count in heads.items()}
    given = {"o": make.standard_normal((14, 2, 16)), "lse": make.standard_normal((14, 2))}
    whole = gradients(packed, {**tensors, "cu": np.array(ends)}, given)
    for first, end in pairwise(ends):
        cut = {name: x[None, first:end] for name, x in tensors.items()}
        own = {name: x[None, first:end] for name, x in given.items()}
        alone = gradients(plain, {**cut, "unused": np.zeros(1, np.int64)}, own)
        for name, value in alone.items():
            np.testing.assert_array_equal(value[0], whole[name][first:end])
    assert not any(whole[name][12:].any() for name in whole)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}, {"B": 1}, {"M": 1, "N": 1}], ids=str)
def test_sizes_of_nothing(sizes: dict[str, int]) -> None:
    made = subject()
    assert_within_bound(made, case(made, 1, **sizes), fills=every_fill())


@pytest.mark.slow
def test_many_sequences() -> None:
    """More than one round of the search looks at."""
    made = subject()
    assert_within_bound(made, case(made, 4, B=130, M=3, N=5, G=1))


def test_sums_in_memory_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="dq of packed sequences is made by a pass of its own"):
        subject(backward="accumulate.dq = atomic")


@pytest.mark.slow
def test_the_operator_keeps_the_promises_of_torch() -> None:
    made = subject()
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, 16, generator=make).half().requires_grad_()
        for rows, heads in ((9, 2), (12, 1), (12, 1))
    )
    cu_q, cu_k = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 10, 12]).int()
    assert made.module.CALL.register_operators()
    name = next(
        op for op in dir(torch.ops.attnc) if op.startswith("a_") and not op.endswith(("_backward", "_out"))
    )
    torch.library.opcheck(getattr(torch.ops.attnc, name), (q, k, v, cu_q, cu_k, ""))
