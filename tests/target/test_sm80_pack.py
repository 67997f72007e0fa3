"""What the rows of a tile stand for, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from attnc.expr.nodes import Dim
from attnc.plan.access import Sequences
from attnc.target.sm80.pack import HeadPack, QueryPack
from attnc.target.sm80.printer import settle

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


def test_tiles_of_one_query_count_rows_from_its_first_head() -> None:
    alone = QueryPack(group="6", alone="6", head="h_kv", heads="Hkv", h_kv="h / 6")
    assert alone.all_rows("M") == "6"
    assert (alone.query_of("row"), alone.head_of("row")) == ("q_lo", "h_kv * 6 + row")
    place, last = settle(f"{{\n{alone.place[0]}\n{alone.last_query}\nuse(b, h_kv, q_hi);\n}}").splitlines()[
        1:3
    ]
    assert last == "const int q_hi = q_lo;"
    heads, queries, sequences, tiles = 3, 5, 2, 2
    found = []
    for tile in range(sequences * heads * queries * tiles):
        names: dict[str, Any] = {"tile": tile, "row_tiles": tiles, "Hkv": heads}
        names["args"] = SimpleNamespace(M=queries)
        for name, value in _values_of(place):
            names[name] = eval(value.replace("/", "//"), {}, names)
        found.append((names["b"], names["h_kv"], names["q_lo"]))
    every = [(b, h, q) for b in range(sequences) for h in range(heads) for q in range(queries)]
    assert sorted(found) == sorted([*every, *every])


def _values_of(declaration: str) -> list[tuple[str, str]]:
    """The names of a declaration of integers, with their values."""
    parts = declaration.removeprefix("const int ").removesuffix(";").split(", ")
    return [(name, value) for name, _, value in (part.partition(" = ") for part in parts)]


def test_one_kv_head_has_no_number() -> None:
    only = HeadPack(group="H", alone="", head="", heads="H", h_kv="0")
    assert only.head_of("row") == "row % H"
    assert only.place[0] == "const int b = tile / row_tiles;"


#: Where packed sequences begin and end: one is empty, and rows follow the last.
BEGINS, ROWS, TILE, HEADS = (0, 70, 70, 101), 110, 64, 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("group", [1, 3, 5, 64, 128, 200])
@pytest.mark.parametrize("last_first", [False, True])
def test_each_packed_row_of_a_head_has_one_tile(group: int, *, last_first: bool) -> None:
    packed = replace(GROUPED, sequences=Sequences(cu_seqlens="cu", rows=Dim("T")), last_first=last_first)
    tiles = ROWS * group // TILE + len(BEGINS)
    found = [place for tile in range(HEADS * tiles) for place in _places_of(packed.place, tile, tiles, group)]
    sequences = [*zip(BEGINS, (*BEGINS[1:], ROWS), strict=True)]
    expected = {
        (head, b, row)
        for head in range(HEADS)
        for b, (first, end) in enumerate(sequences)
        for row in range((end - first) * group)
    }
    assert len(found) == len(expected)
    assert set(found) == expected


def _places_of(lines: Sequence[str], tile: int, tiles: int, group: int) -> list[tuple[int, int, int]]:
    """Returns the head, the sequence and its row, of each row that a tile writes, by the printed text:
    of rows behind the last sequence its number is that of a further one, which has no queries.
    """
    text = settle("{\n" + "\n".join([*lines, "use(h_kv, b, q_lo, M);"]) + "\n}").splitlines()[1:-2]
    code = [
        line.strip().removeprefix("const ").removeprefix("int ")
        for line in text
        if not line.strip().startswith("//")
    ]
    names: dict[str, Any] = {
        "T": ROWS, "B": len(BEGINS) - 1, "G": group, "BLOCK_M": TILE, "tile": tile, "row_tiles": tiles,
        "args": SimpleNamespace(cu_ptr=BEGINS, stride_cu_0=1), "min": min,
        "find_sequence_of_rows": lambda cu, stride, number, count, rows: max(
            b for b in range(count + 1) if cu[b * stride] * rows // TILE + b <= number
        ),
    }  # fmt: skip
    for line in code:
        if line.startswith(("if ", "return")):
            continue
        made = line.split(";")[0].replace("/", "//")
        for part in made.split(", ") if made.startswith(("q_rows", "h_kv = tile")) else [made]:
            name, _, value = part.partition(" = ")
            value = value.removeprefix("int ")
            if " ? " in value:
                condition, _, rest = value.partition(" ? ")
                yes, _, no = rest.partition(" : ")
                value = f"({yes}) if {condition} else ({no})"
            names[name.removeprefix("const int ")] = eval(value, {}, names)
    assert names["M"] == (names["q_rows"] if names["sequence"] < names["B"] else 0)
    assert names["b"] == min(names["sequence"], names["B"] - 1)
    end = min(names["row_lo"] + TILE, names["q_rows"] * group)
    return [(names["h_kv"], names["sequence"], row) for row in range(names["row_lo"], end)]
