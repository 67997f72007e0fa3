"""Text of the Triton kernels that make lists of rows of memory: whose list it is, and what it drops."""

from __future__ import annotations

from attnc.target.triton.render import lists_text
from attnc.target.triton.row_lists import RowListsText
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[T, Hkv * G, 32] via ragged(cu)
  input k, v: bf16[U, Hkv, 32] via ragged(ck)
  input cu: i32[B + 1]
  input ck: i32[B + 1]
  input doc: i32[U]
  input cnt: i32[T]
  input sink: f32[Hkv * G]
  input idx: i32[T, Hkv, S]
  score = dot(q, k) / 8
  mask = listed(idx[cu[b] + q_idx, h // G], keys = 1, count = cnt[cu[b] + q_idx]) and doc[ck[b] + kv_idx] > 0
  normalize = softmax(sink = sink[h])
  output o: bf16[T, Hkv * G, 32]
}

schedule a for triton {
  loops = [kv], pack = gqa
}
"""


def text() -> RowListsText:
    (module,) = modules_of(TEXT)
    found = lists_text(module.seen)
    assert isinstance(found, RowListsText)
    return found


def test_a_list_belongs_to_a_row_of_memory_and_a_head() -> None:
    first, second, *program = text().indices
    assert (first, second) == ("query_row = line % T", "h_kv = line // T % Hkv")
    assert program[0] == "sequence = _upper_bound(cu_ptr, stride_cu_0, sequences + 1, query_row) - 1"
    assert "query = query_row - q_first" in program
    assert text().line_count == "1 * Hkv * T"


def test_entries_count_where_a_query_has_a_list() -> None:
    found = text()
    assert (
        found.offset == "tl.cast(query_row, tl.int64) * stride_idx_0 + tl.cast(h_kv, tl.int64) * stride_idx_1"
    )
    assert found.count.startswith("tl.where((0 <= sequence) & (sequence < sequences)")
    assert found.count.endswith(", tl.minimum(cnt, S).to(tl.int32), 0)")


def test_a_key_is_dropped_by_the_rest_of_the_mask() -> None:
    load, test = text().keeps
    assert load.startswith(
        "doc_kv = tl.load(doc_ptr + (ck.to(tl.int64) + kv_idx).to(tl.int64) * stride_doc_0"
    )
    assert test == "named = named & (doc_kv > 0)"


def test_keys_become_rows_of_memory() -> None:
    found = text()
    assert (found.stop, found.place("block")) == ("N", "k_first + block")
    assert found.length == "tl.where((0 <= sequence) & (sequence < sequences) & (query < M), found, -1)"


def test_a_kernel_takes_the_tensors_that_it_reads() -> None:
    pointers, strides, _ = text().listing_parameters
    assert pointers == "cu_ptr, ck_ptr, doc_ptr, cnt_ptr, idx_ptr, _lists_ptr, _list_bits_ptr"
    assert "stride_idx_2" in strides
