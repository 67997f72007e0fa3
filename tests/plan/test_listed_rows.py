"""What a kernel finds out that makes lists of rows of memory, and what the kernel behind it sees."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import TRUE, show
from attnc.model.dtypes import DType
from attnc.plan.ir import Let, Module
from attnc.plan.ir.module import ListedRows
from attnc.plan.listed_rows import as_rows, name_sequences
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[QUERIES, Hkv * G, 64] Q_STORAGE
  input k, v: bf16[KEYS, Hkv, 64] K_STORAGE
  input idx: i32[LISTS, S]
  EXTRAS
  score = dot(q, k) / 8
  mask = listed(idx, rows = 1, keys = 1) REST
  normalize = softmax
  output o: bf16[QUERIES, Hkv * G, 64]
}

schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa
}
"""
USUAL = {
    "QUERIES": "B, M",
    "KEYS": "B, N",
    "LISTS": "B, M",
    "EXTRAS": "",
    "REST": "",
    "Q_STORAGE": "",
    "K_STORAGE": "",
}
QUERIES = {"QUERIES": "T", "Q_STORAGE": "via ragged(cu)", "LISTS": "T", "EXTRAS": "input cu: i32[B + 1]"}
TABLE = "input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]"
PAGES = {"K_STORAGE": "via paged(table, page = 16)", "EXTRAS": TABLE}


def planned(**changes: str) -> Module:
    text = TEXT
    for word, value in {**USUAL, **changes}.items():
        text = text.replace(word, value)
    (module,) = modules_of(text)
    return module


def rows_of(**changes: str) -> ListedRows:
    found = planned(**changes).listed_rows
    assert found is not None
    return found


def test_a_list_that_says_all_stays_a_list_of_keys() -> None:
    assert planned().listed_rows is None


@pytest.mark.parametrize(
    ("rest", "keep"),
    [("and causal", "kv_idx <= query + N - M"), ("and kv_idx >= left[b]", "kv_idx >= left_value")],
)
def test_a_mask_is_a_condition_of_each_key(rest: str, keep: str) -> None:
    rows = rows_of(REST=rest, EXTRAS="input left: i32[B]")
    assert show(rows.keep) == keep
    assert [show(size) for size in rows.lines] == ["B", "M"]
    assert (rows.by_head, rows.packed, rows.page, show(rows.first)) == (False, False, None, "0")


def test_a_mask_of_heads_has_lists_of_heads() -> None:
    rows = rows_of(REST="and see[h // G, kv_idx]", EXTRAS="input see: bool[Hkv, N]")
    assert [show(size) for size in rows.lines] == ["B", "Hkv", "M"]
    assert rows.by_head


def test_pages_are_looked_up_key_by_key() -> None:
    rows = rows_of(**PAGES)
    assert rows.keep == TRUE
    assert rows.page is not None
    assert [show(index) for index in rows.page.load.indices] == ["b", "kv_idx // 16"]
    assert rows.page_rows is not None
    assert show(rows.page_rows) == "16"


def test_packed_queries_find_their_sequence() -> None:
    rows = rows_of(**QUERIES)
    assert [show(size) for size in rows.lines] == ["1", "T"]
    lets = {item.name: show(item.value) for item in rows.program if isinstance(item, Let)}
    assert lets["query"] == "query_row - q_first"
    assert lets["M"] == "q_end - q_first"
    assert [show(index) for index in rows.indices] == ["query_row"]
    assert show(rows.is_query) == "0 <= sequence < sequences and query < M"
    assert show(rows.first) == "sequence * list_blocks"  # keys have a batch: its rows are a page


def test_packed_keys_are_rows_behind_the_first_of_their_sequence() -> None:
    extras = "input cu: i32[B + 1]\n  input ck: i32[B + 1]"
    rows = rows_of(**{**QUERIES, "EXTRAS": extras, "KEYS": "U", "K_STORAGE": "via ragged(ck)"})
    assert show(rows.first) == "k_first"
    assert (rows.page, rows.page_rows) == (None, None)


@pytest.mark.parametrize("shortens", [False, True])
def test_queries_of_no_sequence_are_marked_beside_a_sink(shortens: bool) -> None:
    text = TEXT.replace("= softmax", "= softmax(sink = sink[h])")
    extras = "input sink: f32[Hkv * G]\n  input m: i32[B]" + ("\n  length M = m[b]" if shortens else "")
    for word, value in {**USUAL, "REST": "and causal", "EXTRAS": extras}.items():
        text = text.replace(word, value)
    (module,) = modules_of(text)
    assert module.listed_rows is not None
    assert module.listed_rows.marks == shortens


def test_the_kernel_behind_sees_one_sequence_and_no_mask() -> None:
    module = planned(**{**QUERIES, "REST": "and causal"})
    assert module.listed_rows is not None
    seen = as_rows(module.variant, module.listed_rows).attention
    assert module.seen.variant.attention == seen
    assert seen.q.storage.is_plain
    assert show(seen.mask).startswith("listed(")
    assert show(seen.tensor("cu").shape[0]) == "sequences + 1"
    assert {size.name: show(size.value) for size in module.sizes}["B"] == "1"
    assert module.kernel.step.keep is not None
    assert show(module.kernel.step.keep) == "kv_idx < N"
    assert DType(seen.q.dtype) is DType.BF16


def test_sequences_keep_their_name_where_queries_are_not_packed() -> None:
    attention = planned(**PAGES).variant.attention
    assert name_sequences(attention) is attention


def test_sizes_of_other_inputs_are_no_rows_of_memory() -> None:
    """Beside packed queries an input may have axes M and N of its own, and one called as a kernel's size."""
    extras = "input cu: i32[B + 1]\n  input see: bool[M, N, sequences]"
    module = planned(**{**QUERIES, "EXTRAS": extras, "REST": "and see[q_idx, kv_idx, 0]"})
    shapes = {arg.tensor.name: [show(size) for size in arg.tensor.shape] for arg in module.args}
    assert shapes["see"] == ["most_queries", "N", "sequences"]
    assert shapes["cu"] == ["sequences_ + 1"]
