"""The number of a tile says the same place in the text of every target, and each place has one number."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from attnc.expr.nodes import Dim, Index
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan.access import Sequences, TileWalk
from attnc.plan.ir import Decode, Module
from attnc.plan.lower import plan
from attnc.plan.sm80 import layout_of
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.sm80.kernel import CudaDecodeText
from attnc.target.sm80.printer import CudaWalk, settle
from attnc.target.templates import python_environment
from attnc.target.triton.decode import DecodeText
from attnc.target.triton.kernel import ProgramText

Place = tuple[int, int, int]
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
    lines = str(program().tile_of(text.kernel, text)).strip()
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
    text = CudaWalk(walk=walked, of_call="", section="", last_rounds=rounds)
    lines = [f"const int {walked.tiles} = {text.tiles};", *text.place, "use(b);"]
    printed = settle("{\n" + "\n".join(lines) + "\n}").splitlines()[1:-2]
    code = (line.replace("(int)", "") for line in printed if not line.strip().startswith("//"))
    python = "\n".join(map(_python, code))
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
    python = [_python(line) for line in printed if not line.startswith("//")]
    tiles = eval(_python(text.tiles), dict(sizes), {"args": args})
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


def _python(line: str) -> str:
    """A declaration of C++ with sizes that are not negative."""
    code = line.split("  //")[0].removeprefix("const ").removeprefix("int ").rstrip(";").replace("/", "//")
    code = re.sub(r", (?=\w+ = )", "; ", code)
    return re.sub(r"= ([^;?]*) \? ([^;:]*) : ([^;]*)", r"= (\2) if (\1) else (\3)", code)


DECODING = """attention steps {{
  input q: bf16[B, {h}, M, 64]
  input k, v: bf16[B, {kv}, N, 64]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[B, {h}, M, 64]
}}
schedule steps for {target} {{
  loops = [kv], tile.q = 16, tile.kv = 64, split.kv = auto{more}
}}
"""


@pytest.mark.parametrize(
    ("h", "kv", "pack"),
    [("H", "H", ""), ("Hkv * G", "Hkv", ""), ("Hkv * G", "Hkv", ", pack = gqa"), ("H", 1, ", pack = gqa")],
    ids=["a head", "a head of a group", "groups", "all heads"],
)
def test_each_row_of_a_decode_kernel_is_in_one_tile(h: str, kv: str | int, pack: str) -> None:
    sizes = {"B": 2, "H": 6, "Hkv": 3 if kv == "Hkv" else 1, "M": 5, "BLOCK_M": 4}
    sizes["G"] = sizes["H"] // sizes["Hkv"]
    found = []
    for target, more in (("triton", ""), ("cuda.sm_80", ", warp_split = kv")):
        text = DECODING.format(h=h, kv=kv, target=target, more=pack + more)
        program = resolve(parse(Source("steps.attn", text)), prelude())
        (variant,) = variants(program, program.attentions[0])
        module = plan(variant, program.schedules[0])
        assert isinstance(module.kernel, Decode)
        found.append(_rows_of(module, module.kernel, sizes))
    places = [(b, h, q) for b in range(2) for h in range(6) for q in range(5)]
    assert sorted(row for tile in found[0] for row in tile) == places
    assert found[0] == found[1]


def _rows_of(module: Module, kernel: Decode, sizes: dict[str, int]) -> list[list[Place]]:
    """Batch entry, head and query of every row, tile by tile, as the text of a target says it."""
    triton = module.target == "triton"
    text = DecodeText(module, kernel) if triton else CudaDecodeText(module, kernel, layout_of(kernel))
    rows = text.all_rows if isinstance(text, DecodeText) else text.all_rows("M")
    tl = SimpleNamespace(minimum=min)
    count = eval(rows, dict(sizes))
    row_tiles = -(-count // sizes["BLOCK_M"])
    heads = kernel.walk.heads if kernel.walk.head else ""
    found = []
    for tile in range(sizes["B"] * sizes.get(heads, 1) * row_tiles):
        row_lo = tile % row_tiles * sizes["BLOCK_M"]
        names = {**sizes, "tl": tl, "min": min, "row_tiles": row_tiles, "row_lo": row_lo, "tile": tile}
        if isinstance(text, DecodeText):
            lines = text.heads
        else:
            block = [*text.heads, *text.last_row, "use(b, h, h_kv, q_lo, q_hi);"]
            printed = settle("{\n" + "\n".join(block) + "\n}").splitlines()[1:-2]
            lines = [_python(line) for line in printed]
        values: dict[str, Any] = dict(names)
        exec("\n".join(lines), values)  # lines that this compiler printed
        own: list[Place] = []
        for row in range(row_lo, min(row_lo + sizes["BLOCK_M"], count)):
            values["row"] = row
            if isinstance(text, DecodeText):
                exec("\n".join(line for line in text.rows_of_tile if "exists" not in line), values)
            else:
                values["q_idx"] = eval(text.query_of("row").replace("/", "//"), values)
                values["h"] = eval(text.head_of("row").replace("/", "//"), values)
            own.append((values["b"], values["h"], values["q_idx"]))
        found.append(own)
    return found
