"""Text of the kernel that makes lists of rows of memory: whose list it is, and what it drops."""

from __future__ import annotations

from attnc.model.dtypes import DType
from attnc.target.sm80.printer import settle
from attnc.target.sm80.row_lists import CudaRowListsText, in_sequence_of, lists_text
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[T, Hkv * G, 64] via ragged(cu)
  input k, v: bf16[B, N, Hkv, 64] via paged(table, page = 16)
  input cu: i32[B + 1]
  input table: i32[B, P]
  input n: i32[B]
  length N = n[b]
  input sink: f32[Hkv * G]
  input idx: i32[T, Hkv, S]
  score = dot(q, k) / 8
  mask = listed(idx, rows = 1, keys = 1) and causal
  normalize = softmax(sink = sink[h])
  output o: bf16[T, Hkv * G, 64]
}

schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa
}
"""


def text(keys: int = 1) -> CudaRowListsText:
    (module,) = modules_of(TEXT.replace("keys = 1)", f"keys = {keys})"))
    found = lists_text(module, {arg.tensor.name: DType(arg.tensor.dtype) for arg in module.args})
    assert isinstance(found, CudaRowListsText)
    return found


def lines_of(found: CudaRowListsText) -> str:
    return settle("\n".join((*found.indices, "h_kv + query + table_row + n + N + M + P + T + sequences;")))


def test_a_list_belongs_to_a_row_of_memory_and_a_head() -> None:
    found = lines_of(text())
    assert "const int query_row = line % args.T, h_kv = line / args.T % args.Hkv;" in found
    assert (
        "const int sequence = upper_bound(args.cu_ptr, args.stride_cu_0, sequences + 1, query_row) - 1;"
        in found
    )
    assert "int N = args.N;" in found
    assert "N = max(min(n_value, N), 0);" in found
    assert text().lines == "(1) * (Hkv) * (T)"


def test_entries_count_where_a_query_has_a_list() -> None:
    assert text().offset == " + (query_row) * args.stride_idx_0 + (h_kv) * args.stride_idx_1"
    assert text().count == "0 <= sequence && sequence < sequences && query < M && query_row < T ? args.S : 0"


def test_a_key_is_dropped_by_the_rest_of_the_mask() -> None:
    assert text().keeps == ["auto keeps = [&](int kv_idx) {", "    return kv_idx <= query + N - M;", "};"]
    assert text().stop == "N"


def test_keys_become_rows_of_pages() -> None:
    found = text()
    assert found.place("key") == "key"
    assert found.pages[-2] == "    row[1 + i] = (int)table_kv * 16 + kv_idx % 16;"
    assert found.page_rows == "16"


def test_a_row_that_is_no_query_has_a_list_of_length_minus_one_beside_a_sink() -> None:
    (module,) = modules_of(TEXT)
    assert in_sequence_of(module, "row") == "list_length >= 0"
    assert text().found == "0 <= sequence && sequence < sequences && query < M ? found : -1"
    (without,) = modules_of(TEXT.replace("(sink = sink[h])", ""))
    assert in_sequence_of(without, "row") == ""


def test_a_block_lies_in_words_of_bits_piece_by_piece() -> None:
    assert [text(keys).piece for keys in (1, 3, 48, 64, 80)] == [0, 1, 16, 32, 16]
    assert text(64).count.endswith("? args.S : 0"), "blocks"


def test_a_list_has_room_for_all_keys_of_its_blocks() -> None:
    assert text().memory == "(1) * (Hkv) * (T) * (S + 1)"
    assert text(64).memory == "(1) * (Hkv) * (T) * (S * 64 + 1)"
