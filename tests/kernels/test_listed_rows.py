"""Lists of single keys as lists of rows of memory: on Hopper beside masks, lengths, pages and packed
sequences; for Triton of packed sequences, with gradients. And packed queries beside keys that are not
packed, whose lists Triton follows as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attnc.verify.subject import Subject
from tests.kernels.test_lists import wrong
from tests.targets import skip_without_compiler
from tests.verify.judging import examples, subject_of_text

TEXT = """attention a {
  input q: ELEMENT[QUERIES, HEADS, 64] Q_STORAGE
  input k, v: ELEMENT[KEYS, KV, 64] K_STORAGE
  input idx: i32[LISTS, S]
  EXTRAS
  score = SCORE
  mask = MASK
  normalize = SOFTMAX
  output o: ELEMENT[QUERIES, HEADS, 64]
  ALSO
}

schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa, SCHEDULE
}
"""
USUAL = {
    "ELEMENT": "bf16",
    "QUERIES": "B, M",
    "KEYS": "B, N",
    "HEADS": "Hkv * G",
    "KV": "Hkv",
    "Q_STORAGE": "",
    "K_STORAGE": "",
    "LISTS": "B, Hkv, M",
    "EXTRAS": "",
    "SCORE": "dot(q, k) / 8",
    "MASK": "listed(idx, rows = 1, keys = 1) and causal",
    "SOFTMAX": "softmax",
    "ALSO": "output lse: f32[LSE]",
    "LSE": "B, HEADS, M",
    "SCHEDULE": "stages = 2",
}
PACKED_QUERIES = {"QUERIES": "T", "Q_STORAGE": "via ragged(cu)", "LISTS": "T, Hkv", "LSE": "T, HEADS"}
PACKED_KEYS = {"KEYS": "U", "K_STORAGE": "via ragged(ck)"}
PAGES = {"K_STORAGE": "via paged(table, page = 16)"}
CU, CK, LENGTH = "input cu: i32[B + 1]", "input ck: i32[B + 1]", "input n: i32[B]\n  length N = n[b]"
TABLE = f"input table: i32[B, P]\n  {LENGTH}"
CASES: Mapping[str, Mapping[str, str]] = {
    "a causal mask": {"SCHEDULE": "split.kv in {auto, 3}"},
    "packed sequences": {
        **PACKED_QUERIES,
        **PACKED_KEYS,
        "EXTRAS": f"{CU}\n  {CK}\n  input sink: f32[Hkv * G]",
        "SOFTMAX": "softmax(sink = sink[h])",
        "SCHEDULE": "split.kv in {2, auto}",
    },
    "softpick of packed queries": {
        **PACKED_QUERIES,
        **PACKED_KEYS,
        "EXTRAS": f"{CU}\n  {CK}",
        "SOFTMAX": "softpick",
        "SCHEDULE": "split.kv in {2, auto}",
    },
    "softpick of lengths": {
        "EXTRAS": f"input m: i32[B]\n  {LENGTH}\n  length M = m[b]",
        "SOFTMAX": "softpick",
    },
    "weights of packed queries": {
        **PACKED_QUERIES,
        **PACKED_KEYS,
        "EXTRAS": f"{CU}\n  {CK}",
        "SCORE": "dot(q, k) / 8\n  weight = sigmoid(score)",
        "SOFTMAX": "none",
        "ALSO": "",
        "SCHEDULE": "split.kv in {2, auto}",
    },
    "pages": {**PAGES, "EXTRAS": TABLE},
    "packed queries over pages": {
        **PACKED_QUERIES,
        **PAGES,
        "HEADS": "G",
        "KV": "1",
        "LISTS": "T",
        "LSE": "G, T",
        "EXTRAS": f"{CU}\n  {TABLE}\n  input cnt: i32[T]",
        "MASK": "listed(idx, rows = 1, keys = 1, count = cnt) and window(50, 0)",
        "SCHEDULE": "split.kv = auto",
    },
    "lengths": {
        "EXTRAS": f"input m: i32[B]\n  {LENGTH}\n  length M = m[b]\n  input sink: f32[Hkv * G]",
        "SOFTMAX": "softmax(sink = sink[h])",
    },
    "packed queries over rows of a batch": {**PACKED_QUERIES, "EXTRAS": f"{CU}\n  {LENGTH}"},
    "packed keys": {**PACKED_KEYS, "EXTRAS": CK, "ELEMENT": "f16"},
    "pages of no multiple of 8": {
        "K_STORAGE": "via paged(table, page = 12)",
        "EXTRAS": f"input table: i32[B, P]\n  {LENGTH}",
        "MASK": "listed(idx, rows = 1, keys = 1)",
    },
    "documents": {
        "EXTRAS": "input doc: i32[B, N]",
        "MASK": "listed(idx, rows = 1, keys = 1) and doc[b, q_pos] == doc[b, kv_idx]",
    },
    "documents of packed sequences": {
        **PACKED_QUERIES,
        **PACKED_KEYS,
        "EXTRAS": f"{CU}\n  {CK}\n  input doc: i32[U]",
        "MASK": "doc[ck[b] + q_pos] == doc[ck[b] + kv_idx] and listed(idx, rows = 1, keys = 1)",
    },
    "elements of heads": {
        "EXTRAS": "input see: bool[B, Hkv, M, N]",
        "MASK": "listed(idx, rows = 1, keys = 1) and see[b, h // G, q_idx, kv_idx]",
        "LISTS": "M",
    },
    "a list of three queries": {
        "LISTS": "B, R",
        "MASK": "listed(idx, rows = 3, keys = 1) and window(60, 5)",
    },
    "one list for all queries": {"LISTS": "Hkv", "MASK": "listed(idx, keys = 1) and causal"},
    "lists of other queries": {
        "LISTS": "B, R",
        "EXTRAS": "input cnt: i64[B, R]",
        "MASK": "listed(idx[b, (q_idx + 1) % 5], keys = 1, count = cnt[b, q_idx % 3]) and kv_idx > 4",
    },
    "a temperature of queries": {
        "EXTRAS": "input t: f32[B, M]",
        "SCORE": "dot(q, k) * t[b, q_idx]",
    },
    "a temperature of sequences": {
        "EXTRAS": "input t: f32[B]",
        "SCORE": "dot(q, k) * t[b]",
        "MASK": "listed(idx, rows = 1, keys = 1)",
    },
    "blocks": {"MASK": "listed(idx, rows = 1, keys = 32)", "SCHEDULE": "split.kv in {auto, 3}"},
    "blocks of packed queries over pages": {
        **PACKED_QUERIES,
        **PAGES,
        "HEADS": "G",
        "KV": "1",
        "LISTS": "T",
        "LSE": "G, T",
        "EXTRAS": f"{CU}\n  {TABLE}\n  input cnt: i32[T]",
        "MASK": "listed(idx, rows = 1, keys = 64, count = cnt) and window(90, 0)",
        "SCHEDULE": "split.kv = auto",
    },
    "small blocks of packed sequences": {
        **PACKED_QUERIES,
        **PACKED_KEYS,
        "EXTRAS": f"{CU}\n  {CK}\n  input sink: f32[Hkv * G]",
        "MASK": "listed(idx, rows = 1, keys = 5) and causal",
        "SOFTMAX": "softmax(sink = sink[h])",
    },
    "one list of blocks for all queries": {"LISTS": "Hkv", "MASK": "listed(idx, keys = 48) and causal"},
    "every third key": {"MASK": "listed(idx, rows = 1, keys = 1) and kv_idx % 3 != 1"},
}


def subject(name: str) -> Subject:
    text = TEXT
    for word, value in {**USUAL, **CASES[name]}.items():
        text = text.replace(word, value)
    for word, value in {**USUAL, **CASES[name]}.items():  # those of others
        text = text.replace(word, value)
    return subject_of_text(text)


SIZES = {"B": 3, "M": 5, "N": 190, "Hkv": 2, "G": 3, "R": 2, "S": 120, "T": 12, "U": 260, "P": 9}
BY_DAY = (
    "packed sequences",
    "packed queries over pages",
    "elements of heads",
    "lengths",
    "softpick of packed queries",
    "blocks of packed queries over pages",
    "weights of packed queries",
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in BY_DAY else [pytest.mark.nightly]) for x in CASES]
)
def test_lists_name_rows_of_memory(name: str) -> None:
    skip_without_compiler("cuda.sm_90a")
    assert not list(wrong(subject(name), SIZES, range(1, 1 + examples(2))))


TRITON = """attention a {
  input q: bf16[T, HEADS, 32] via ragged(cu)
  KEYS
  input cu: i32[B + 1]
  input ck: i32[B + 1]
  input idx: i32[LISTS, S]
  EXTRAS
  score = dot(q, k) / 6
  mask = MASK
  normalize = SOFTMAX
  output o: bf16[T, HEADS, COLUMNS]
  output lse: f32[HEADS, T]
  GRADS
}

schedule a for triton {
  loops = [kv], pack = gqa
  SCHEDULE
}
"""
LATENT = "input k: bf16[U, 1, 32] via ragged(ck)\n  input v: bf16[U, 1, 16] via prefix(k)"
ON_TRITON: Mapping[str, Mapping[str, str]] = {
    "latent attention": {"GRADS": "grad q, k"},
    "added as it comes": {
        "GRADS": "grad q, k",
        "SCHEDULE": "backward { accumulate.dk = atomic }",
        "MASK": "listed(idx, rows = 1, keys = 1)",
    },
    "heads with keys of their own": {
        "HEADS": "Hkv * G",
        "KEYS": "input k, v: bf16[U, Hkv, 32] via ragged(ck)",
        "LISTS": "T, Hkv",
        "COLUMNS": "32",
        "GRADS": "grad q, k, v",
        "EXTRAS": "input doc: i32[U]",
        "MASK": "doc[ck[b] + q_pos] == doc[ck[b] + kv_idx] and listed(idx, rows = 1, keys = 1)",
    },
    "a sink": {"EXTRAS": "input sink: f32[G]\n  input cnt: i32[T]", "SOFTMAX": "softmax(sink = sink[h])"},
    "softpick": {"SOFTMAX": "softpick", "GRADS": "grad q, k"},
    "keys alone": {"GRADS": "grad k", "MASK": "window(20, 3) and listed(idx, rows = 1, keys = 1)"},
    "a length": {"EXTRAS": "input n: i32[B]\n  length N = n[b]", "GRADS": "grad q, k"},
}


def subject_on_triton(name: str) -> Subject:
    usual = {
        "HEADS": "G",
        "KEYS": LATENT,
        "LISTS": "T",
        "EXTRAS": "",
        "MASK": "listed(idx, rows = 1, keys = 1) and causal",
        "SOFTMAX": "softmax",
        "COLUMNS": "16",
        "GRADS": "",
        "SCHEDULE": "",
    }
    text = TRITON
    for word, value in {**usual, **ON_TRITON[name]}.items():
        text = text.replace(word, value)
    return subject_of_text(text)


TRITON_SIZES = {"B": 3, "M": 5, "N": 40, "Hkv": 2, "G": 3, "S": 40, "T": 13, "U": 90}
TRITON_BY_DAY = ("latent attention", "heads with keys of their own", "a sink", "softpick")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in TRITON_BY_DAY else [pytest.mark.nightly]) for x in ON_TRITON]
)
def test_packed_sequences_beside_lists_of_tokens(name: str) -> None:
    assert not list(wrong(subject_on_triton(name), TRITON_SIZES, range(1, 1 + examples(2))))


BESIDE_PAGES = """attention a {
  input q: bf16[T, Hkv * G, 32] via ragged(cu)
  KEYS
  input cu: i32[B + 1]
  input idx: i32[LISTS, S]
  EXTRAS
  score = SCORE
  mask = listed(idx, rows = 1, keys = SIZE) and MASK
  normalize = SOFTMAX
  output o: bf16[T, Hkv * G, COLUMNS]
  output lse: f32[Hkv * G, T]
}

schedule a for triton {
  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16SCHEDULE
}
"""
OF_PAGES = "input k: bf16[B, N, Hkv, 32] via paged(table, page = 8)\n  "
TABLE_AND_LENGTH = "input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]"
OTHER_KEYS: Mapping[str, Mapping[str, str]] = {
    "latents in pages": {"EXTRAS": f"{TABLE_AND_LENGTH}\n  input cnt: i32[T, Hkv]", "SIZE": "1, count = cnt"},
    "latents in pages, split": {"SCHEDULE": ", split.kv in {auto, 3}"},
    "keys and values in pages": {
        "KEYS": "input k, v: bf16[B, N, Hkv, 32] via paged(table, page = 8)",
        "COLUMNS": "32",
        "EXTRAS": f"{TABLE_AND_LENGTH}\n  input sink: f32[Hkv * G]",
        "SOFTMAX": "softmax(sink = sink[h])",
        "SCHEDULE": ", split.kv in {2, auto}",
    },
    "keys of a batch": {
        "KEYS": "input k, v: bf16[B, N, Hkv, 32]",
        "COLUMNS": "32",
        "EXTRAS": "input doc: i32[B, N]",
        "MASK": "doc[b, q_pos] == doc[b, kv_idx]",
    },
    "blocks of 5 keys": {"SIZE": "5", "LISTS": "T", "SOFTMAX": "softpick"},
    "a score of places": {"SCORE": "dot(q, k) / 6 + (q_pos - kv_idx) / 50"},
    "dropped keys": {
        "EXTRAS": f"{TABLE_AND_LENGTH}\n  input p: f32[]\n  input seed: i64[]",
        "SOFTMAX": "softmax(dropout = p, seed = seed)",
    },
}


def subject_of_pages(name: str) -> Subject:
    usual = {
        "KEYS": f"{OF_PAGES}input v: bf16[B, N, Hkv, 16] via prefix(k)",
        "LISTS": "T, Hkv",
        "EXTRAS": TABLE_AND_LENGTH,
        "SCORE": "dot(q, k) / 6",
        "SIZE": "1",
        "MASK": "window(30, 4)",
        "SOFTMAX": "softmax",
        "COLUMNS": "16",
        "SCHEDULE": "",
    }
    text = BESIDE_PAGES
    for word, value in {**usual, **OTHER_KEYS[name]}.items():
        text = text.replace(word, value)
    return subject_of_text(text)


PAGES_SIZES = {"B": 3, "M": 5, "N": 40, "Hkv": 2, "G": 3, "S": 20, "T": 11, "P": 5}
PAGES_BY_DAY = ("latents in pages", "keys and values in pages", "blocks of 5 keys")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in PAGES_BY_DAY else [pytest.mark.nightly]) for x in OTHER_KEYS]
)
def test_packed_queries_list_keys_that_are_not_packed(name: str) -> None:
    assert not list(wrong(subject_of_pages(name), PAGES_SIZES, range(1, 1 + examples(2))))
