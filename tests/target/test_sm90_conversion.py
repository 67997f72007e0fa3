"""The kernel that converts K and V, as text: where a row is, for whatever order of axes."""

from __future__ import annotations

import math
import re

import pytest

from attnc.plan.conversion import COLUMNS_AT_ONCE, CONVERT_THREADS
from attnc.plan.ir import Module
from attnc.plan.sm90 import layout_of
from attnc.support.sizes import evaluate
from attnc.target.files import render_files
from attnc.target.sm90.conversion import ConversionText
from attnc.target.sm90.kernel import Sm90Text
from tests.verify.judging import modules_of, spec

SIZES = {"B": 2, "N": 5, "Hkv": 3, "S": 7}


def module_of(axes: str, *, packed: bool = False, block: str = "") -> Module:
    storage = " via ragged(ends)" if packed else ""
    rows = "T, Hkv * G" if packed else "B, M, Hkv * G"
    lines = [
        f"input q: bf16[{rows}, 64]{' via ragged(ends)' if packed else ''}",
        f"input k, v: e4m3[{axes}, 64]{storage}",
        *(["input ends: i32[B + 1]"] if packed else []),
        *(["input ks: f32[B, X, Hkv, 64]"] if block else []),
        f"score = dot(q, k{f' * ks[b, kv_idx, h // G, {block}]' if block else ''}) / 8",
        "normalize = softmax",
        f"output o: bf16[{rows}, 64]",
    ]
    (module,) = modules_of(spec(lines, "", target="cuda.sm_90a"))
    return module


def text_of(module: Module) -> ConversionText:
    assert module.kernel.structure == "forward_q_kv"
    text = Sm90Text(module, module.kernel, layout_of(module.kernel))
    assert text.conversion is not None
    return text.conversion


def source_of(module: Module) -> str:
    files = render_files(module, path="a.attn", sha256="")
    return next(text for name, text in files.items() if name.endswith(".cu"))


@pytest.mark.parametrize(("axes", "order"), [("B, N, Hkv", "b n h_kv"), ("S, Hkv", "n h_kv")])
def test_the_number_of_a_row_is_taken_apart(axes: str, order: str) -> None:
    module = module_of(axes, packed="S" in axes)
    counts = [SIZES[axis] for axis in axes.split(", ")]
    (_, body) = source_of(module).split("const int column_lo = i % 4 * 8;\n", 1)
    statements = body[: body.index("float k_x[2][8];")].splitlines()
    seen = []
    for line in range(math.prod(counts)):
        names = {**SIZES, "line": line}
        for statement in filter(None, map(str.strip, statements)):
            found = re.fullmatch(r"const (?:int|u32) (\w+) = ([^;]+);", statement)
            assert found
            names[found[1]] = eval(found[2].replace("args.", "").replace("/", "//"), {}, names)
        seen.append(tuple(names[name] for name in order.split()))
    assert seen == sorted(set(seen))  # as a contiguous tensor has them
    assert all(place < count for place, count in zip(seen[-1], counts, strict=True))


def test_there_are_blocks_for_the_longer_of_both_and_no_more_than_run_at_once() -> None:
    launch = text_of(module_of("B, N, Hkv")).launch
    blocks = str(launch.values[1]).strip('"')
    names = {**SIZES, "multiprocessors()": lambda: 132}
    assert evaluate(blocks, names) == -(-2 * 5 * 3 * 64 // COLUMNS_AT_ONCE // CONVERT_THREADS)
    assert evaluate(blocks, {**names, "N": 10**6}) == 8 * 132


@pytest.mark.parametrize(("block", "alike"), [("d // 32", True), ("d // 4", False)])
def test_a_scale_is_loaded_once_for_columns_that_share_it(block: str, alike: bool) -> None:
    module = module_of("B, N, Hkv", block=block)
    part = text_of(module).parts[0]
    assert part.is_alike == alike
    assert ("const int column = column_lo + 32 * c + j;" in source_of(module)) != alike


def test_packed_keys_find_their_sequence_where_a_scale_asks_for_it() -> None:
    scaled, plain = (module_of("S, Hkv", packed=True, block=block) for block in ("d // 32", ""))
    search = "min(upper_bound(args.ends_ptr, args.stride_ends_0, args.B + 1, n), args.B) - 1"
    assert (search in source_of(scaled), search in source_of(plain)) == (True, False)
    assert "B" in text_of(scaled).parts[0].dims
    assert "B" not in text_of(plain).parts[0].dims
