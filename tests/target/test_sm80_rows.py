"""Where rows lie in global memory, as text."""

from __future__ import annotations

from dataclasses import replace

from tests.target.texts import text_of


def test_rows_of_a_head_lie_behind_an_offset() -> None:
    rows = text_of("causal_gqa", "bf16_d128").rows
    first = "args.q_ptr + b * args.stride_qb + h * args.stride_qh"
    assert rows.place("q") == f"const Rows<const element> queries = {{{first}, args.stride_qm}};"
    assert [place.split(" = ")[0].split()[-1] for place in rows.places] == ["queries", "keys", "values"]
    assert len(list(replace(rows, v_in_k=True).places)) == 2


def test_pages_are_found_by_a_table() -> None:
    rows = text_of("paged_decode").rows
    assert rows.page > 0
    assert rows.run == 16
    assert rows.place("k").startswith("const Pages<int> keys = ")
    assert rows.page_entry.startswith("(int)")
    assert replace(rows, by_entry=True).page_entry == "list_row[kv_idx]"


def test_rows_that_do_not_exist_are_written_only_where_a_buffer_has_some() -> None:
    assert text_of("causal_gqa", "bf16_d128").rows.if_exists("x", "0") == "x"
    assert text_of("varlen").rows.if_exists("x", "0") == "row < M ? x : 0"
