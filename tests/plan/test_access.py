"""The number of a tile says the same place in the text of every target, and each place has one number."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from attnc.expr.nodes import Dim, Index
from attnc.plan.access import LastSection, Sequences, TileWalk
from attnc.target.sm80.printer import CudaWalk, settle
from attnc.target.templates import drop_empty_lines, python_environment
from attnc.target.triton.program import ProgramText
from tests.target.walks import Place, as_python

SIZES = {"B": 2, "H": 6, "Hkv": 3, "M": 70, "M_padded": 96, "N": 50, "BLOCK_M": 32, "BLOCK_N": 16}


def walk(axis: Literal["q", "kv"], rows: str, *, last_first: bool = False, grouped: bool = False) -> TileWalk:
    return TileWalk(
        axis=axis,
        rows=Dim(rows),
        is_padded=rows == "M_padded",
        head="h_kv" if grouped else "h",
        heads="Hkv" if grouped else "H",
        sequences=None,
        last_first=last_first,
        writes_all_rows=axis == "q",
    )


def place(lines: str, walked: TileWalk, names: dict[str, Any]) -> Place:
    values: dict[str, Any] = {}
    exec(lines, dict(names), values)  # lines that this compiler printed
    return values["b"], values[walked.head], values[walked.lo]


def in_cuda(walked: TileWalk, tile: int, section: int) -> Place:
    text = CudaWalk(walk=walked, of_call="args.")
    lines = [f"const int {walked.tiles} = {text.tiles};", *text.place]
    python = [
        re.sub(r", (?=\w+ = )", "; ", line.removeprefix("const int ")).replace("/", "//") for line in lines
    ]
    names = {**SIZES, "args": SimpleNamespace(**SIZES, SECTION=section), "tile": tile}
    return place("\n".join(line.rstrip(";") for line in python), walked, names)


@cache
def program() -> Any:
    return python_environment().overlay().get_template("triton/_program.py.jinja").module


def in_triton(walked: TileWalk, tile: int, section: int) -> Place:
    text = ProgramText()
    text.kernel = cast("Any", SimpleNamespace(walk=walked, kv_head=Index("h")))
    lines = drop_empty_lines(str(program().tile_of(text.kernel, text))).strip()
    tl = SimpleNamespace(minimum=min, cdiv=lambda a, b: -(-a // b))
    return place(lines, walked, {**SIZES, "tl": tl, "tile": tile, "SECTION": section})


@pytest.mark.parametrize("section", [1, 4, 12])
@pytest.mark.parametrize(
    "walked",
    [
        walk("q", "M"),
        walk("q", "M", last_first=True),
        walk("q", "M_padded", last_first=True),
        walk("kv", "N"),
        walk("kv", "N", grouped=True),
    ],
    ids=["rows", "last rows first", "padded rows", "keys", "keys of groups"],
)
def test_each_place_has_one_number(walked: TileWalk, section: int) -> None:
    rows = SIZES[str(cast("Dim", walked.rows).name)]
    starts = range(0, rows, SIZES[walked.size])
    places = {(b, h, lo) for b in range(SIZES["B"]) for h in range(SIZES[walked.heads]) for lo in starts}
    found = [in_cuda(walked, tile, section) for tile in range(len(places))]
    assert set(found) == places
    assert found == [in_triton(walked, tile, section) for tile in range(len(places))]
    first = max(starts) if walked.last_first else 0
    assert all(lo == first for _, _, lo in found[: min(section, SIZES["B"] * SIZES[walked.heads])])


@pytest.mark.parametrize(("rounds", "blocks"), [(0, 1), (2, 1), (2, 3), (2, 100)])
@pytest.mark.parametrize("last_first", [False, True])
def test_heads_in_turn_and_the_last_ones_together(rounds: int, blocks: int, *, last_first: bool) -> None:
    walked = walk("q", "M", last_first=last_first)
    text = CudaWalk(walk=walked, of_call="", section="", last=LastSection(rounds=rounds))
    lines = [f"const int {walked.tiles} = {text.tiles};", *text.place, "use(b);"]
    printed = settle("{\n" + "\n".join(lines) + "\n}").splitlines()[1:-2]
    code = (line.replace("(int)", "") for line in printed if not line.strip().startswith("//"))
    python = "\n".join(map(as_python, code))
    starts = range(0, SIZES["M"], SIZES[walked.size])
    heads = [(b, h) for b in range(SIZES["B"]) for h in range(SIZES["H"])]
    last = min(-(-rounds * blocks // len(starts)), len(heads))
    grid = SimpleNamespace(x=blocks)
    names = {**SIZES, "args": SimpleNamespace(**SIZES), "gridDim": grid}
    found = [place(python, walked, {**names, "tile": n}) for n in range(len(heads) * len(starts))]
    order = sorted(starts, reverse=last_first)
    first = [(*head, lo) for head in heads[: len(heads) - last] for lo in order]
    assert found == [*first, *((*head, lo) for lo in order for head in heads[len(heads) - last :])]


#: Where packed sequences begin and end: one is empty, and rows follow the last.
BEGINS, ROWS = (0, 70, 70, 100), 110


def find_sequence(begins: tuple[int, ...], stride: int, number: int, count: int, size: int) -> int:
    """As `access.Sequences` says; `count` is what follows the last sequence."""
    assert stride == 1
    return max(b for b in range(count + 1) if begins[b] // size + b <= number)


@pytest.mark.parametrize("section", [1, 6])
@pytest.mark.parametrize(("axis", "last_first"), [("q", False), ("q", True), ("kv", False)])
@pytest.mark.parametrize("of_call", ["", "args."])
def test_each_packed_row_has_one_tile(
    axis: Literal["q", "kv"], of_call: str, section: int, *, last_first: bool
) -> None:
    walked = TileWalk(
        axis=axis,
        rows=Dim("T"),
        is_padded=False,
        head="h",
        heads="H",
        sequences=Sequences(cu_seqlens="cu", rows=Dim("T")),
        last_first=last_first,
        writes_all_rows=axis == "q" and not of_call,
    )
    sizes = {"B": 3, "H": 2, "T": ROWS, "BLOCK_M": 32, "BLOCK_N": 16}
    args = SimpleNamespace(**sizes, SECTION=section, cu_ptr=BEGINS, stride_cu_0=1)
    text = CudaWalk(walk=walked, of_call=of_call)
    lines = [f"const int {walked.tiles} = {text.tiles};", *text.place, "use(b);"]
    printed = settle("{\n" + "\n".join(lines) + "\n}").splitlines()[1:-2]
    python = [as_python(line) for line in printed if not line.startswith("//")]
    tiles = eval(as_python(text.tiles), dict(sizes), {"args": args})
    covered: list[tuple[int, int, int]] = []
    for tile in range(tiles * sizes["H"]):
        values: dict[str, Any] = {}
        names = {**sizes, "args": args, "tile": tile, "find_sequence": find_sequence}
        exec("\n".join(python), names, values)  # lines that this compiler printed
        lo, rows = values[walked.lo], values["M" if axis == "q" else "N"]
        assert rows == (0 if values["sequence"] == 3 else BEGINS[values["b"] + 1] - BEGINS[values["b"]])
        if walked.writes_all_rows:  # those behind the last sequence too
            rows = values["q_rows"]
        covered += [
            (values["sequence"], values["h"], row) for row in range(lo, min(lo + sizes[walked.size], rows))
        ]
    ends = (*BEGINS, ROWS) if walked.writes_all_rows else BEGINS
    lengths = [end - first for first, end in pairwise(ends)]
    wanted = [(b, h, row) for b, length in enumerate(lengths) for h in range(2) for row in range(length)]
    assert sorted(covered) == wanted
