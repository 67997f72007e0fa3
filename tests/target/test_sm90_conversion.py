"""The kernel that converts K and V, as text: where a row is, for whatever order of axes."""

from __future__ import annotations

import re

import pytest

from attnc.plan.ir import Module
from attnc.plan.sm90 import layout_of
from attnc.support.sizes import evaluate
from attnc.target.files import render_files
from attnc.target.sm80.printer import settle
from attnc.target.sm90.conversion import COLUMNS_AT_ONCE, CONVERT_THREADS, ConversionText
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


@pytest.mark.parametrize(("axes", "order"), [("B, N, Hkv", "b n h_kv"), ("S, Hkv", "n h_kv")])
def test_the_number_of_a_row_is_taken_apart(axes: str, order: str) -> None:
    part = text_of(module_of(axes, packed="S" in axes)).parts[0]
    counts = [SIZES[axis] for axis in axes.split(", ")]
    lines = evaluate(part.lines, SIZES)
    seen = []
    for line in range(lines):
        names = {**SIZES, "line": line}
        for statement in part.indices:
            found = re.fullmatch(r"const (?:int|long long) (\w+) = ([^;]+);", statement)
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
    files = render_files(module, path="a.attn", sha256="")
    source = next(text for name, text in files.items() if name.endswith(".cu"))
    assert ("const int column = column_lo + 8 * c + j;" in source) != alike


def test_packed_keys_find_their_sequence_where_a_scale_asks_for_it() -> None:
    scaled, plain = (text_of(module_of("S, Hkv", packed=True, block=x)).parts[0] for x in ("d // 32", ""))
    assert "upper_bound(args.ends_ptr, args.stride_ends_0, args.B + 1, n)" in "\n".join(scaled.places)
    assert "B" in scaled.dims
    assert "B" not in plain.dims
    assert settle("{\n" + "\n".join(plain.places) + "\n}") == "{\n}"
