"""What the rows of a tile stand for, as text."""

from __future__ import annotations

from attnc.target.sm80.pack import HeadPack

GROUPED = HeadPack(group="G", alone="", head="h_kv", heads="Hkv", h_kv="h / G")


def test_heads_that_share_keys_fill_the_rows_of_a_query() -> None:
    assert GROUPED.all_rows("M") == "M * G"
    assert GROUPED.query_of("row") == "row / G"
    assert GROUPED.head_of("row") == "h_kv * G + row % G"
    assert GROUPED.if_head("row") == ""
    assert GROUPED.place[0] == "const int b = tile / row_tiles / Hkv, h_kv = tile / row_tiles % Hkv;"


def test_a_row_of_one_head_is_a_query() -> None:
    single = HeadPack(group="", alone="", head="h", heads="H", h_kv="h / G")
    assert (single.all_rows("M"), single.query_of("row"), single.head_of("row")) == ("M", "row", "h")
    assert "/ G)" not in single.last_query


def test_rows_behind_the_heads_of_a_query_that_is_alone_have_none() -> None:
    alone = HeadPack(group="6", alone="6", head="h_kv", heads="Hkv", h_kv="h / 6")
    assert alone.all_rows("M") == "M * query_rows"
    assert alone.head_of("row") == "h_kv * 6 + row % query_rows"
    assert alone.if_head("row") == " && row % query_rows < 6"


def test_one_kv_head_has_no_number() -> None:
    only = HeadPack(group="H", alone="", head="", heads="H", h_kv="0")
    assert only.head_of("row") == "row % H"
    assert only.place[0] == "const int b = tile / row_tiles;"
