"""Keys and values of 8 bits on Hopper, thread by thread: the bits of the kernel for 16 bits, in every
storage, and the number of every code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from attnc.model.dtypes import DType
from attnc.support.arguments import DTYPES
from attnc.target.files import render_files
from attnc.target.support import with_headers
from attnc.verify import narrow
from attnc.verify.case import Case, TensorLayout
from attnc.verify.check import check
from attnc.verify.problem import build
from attnc.verify.properties import violations
from attnc.verify.subject import Subject, subject_of
from tests.by_day import each_by_day, some_by_day
from tests.profiles import is_night
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec

pytestmark = [needs_gxx, pytest.mark.slow]
NARROW = tuple(dtype for dtype in DType if dtype.is_narrow)


def text_of(
    k: str = "e4m3",
    v: str = "e4m3",
    *,
    q: str = "bf16",
    page: int = 0,
    d: int = 64,
    dv: int = 64,
    mask: str = "causal",
    prefix: bool = False,
    splits: str = "auto, 1",
    knobs: str = "tile.kv = 32",
    scale: str = "vs[h]",
    product: str = "dot(q, k)",
    more: tuple[str, ...] = (),
) -> str:
    """A decode step of grouped heads, or with the values in the keys of the one KV head that all share."""
    paged = f" via paged(table, page = {page})" if page else ""
    heads, shared = ("G", "1") if prefix else ("Hkv * G", "Hkv")
    lines = [
        f"input q: {q}[B, M, {heads}, {d}]",
        f"input k: {k}[B, N, {shared}, {d}]{paged}",
        f"input v: {v}[B, N, {shared}, {dv}]{' via prefix(k)' if prefix else paged}",
        *(["input table: i32[B, P]"] if page else []),
        "input lens: i32[B]",
        *([f"input vs: f32[{'B, N, ' if 'kv_idx' in scale else ''}{heads}]"] if "vs[" in scale else []),
        *more,
        "length N = lens[b]",
        f"score = {product} / 8",
        f"mask = {mask}",
        f"normalize = softmax(v_scale = {scale})",
        f"output o: {q}[B, M, {heads}, {dv}]",
        f"output lse: f32[B, {heads}, M]",
    ]
    schedule = f"loops = [kv], pack = gqa, split.kv = {{{splits}}}".replace("= {", "in {")
    return spec(lines, f"{schedule}\n  {knobs}", target="cuda.sm_90a")


LATENT: Mapping[str, Any] = {"prefix": True, "d": 192, "dv": 128, "knobs": "consumers = 2, tile.kv = 64"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "pages": {"page": 16, "q": "f16"},
    "pages of several boxes": {"page": 8, "knobs": "tile.kv = 64, stages = 1"},
    "small pages": {"page": 4, "k": "e5m2", "v": "e5m2"},
    "wide rows": {"d": 136, "dv": 200, "k": "i8", "v": "i8"},
    "odd rows": {"d": 72, "dv": 40, "page": 16},
    "odd rows in small pages": {"d": 72, "dv": 40, "page": 2},
    "a window": {"mask": "window(40, 0)", "page": 32, "k": "i8", "v": "e5m2", "q": "f16"},
    "documents": {"mask": "causal and q_pos // 64 == kv_idx // 64", "page": 16},
    "keys alone": {"v": "bf16", "page": 16},
    "values alone": {"k": "bf16", "page": 16},
    "values alone, dense": {"k": "f16", "q": "f16", "v": "i8"},
    "keys alone in small pages": {"k": "i8", "v": "bf16", "page": 4},
    "values alone in small pages": {"k": "bf16", "v": "e5m2", "page": 4},
    "a scale of each key": {"scale": "vs[b, kv_idx, h]", "page": 16, "q": "f16"},
    "a scale of each key, window": {"scale": "vs[b, kv_idx, h]", "mask": "window(40, 0)", "v": "bf16"},
    "latent, a scale of each key": {**LATENT, "page": 16, "scale": "vs[b, kv_idx, h]"},
    "latent": {**LATENT, "page": 16},
    "latent in small pages": {**LATENT, "page": 4, "knobs": "consumers = 2, tile.kv = 32"},
    "latent, odd rows": {**LATENT, "page": 8, "d": 200},
    "latent, odd rows, dense": {**LATENT, "k": "e5m2", "v": "e5m2", "d": 152},
    "latent, values in all of the keys": {**LATENT, "page": 16, "d": 128, "q": "f16"},
    "latent, a window": {**LATENT, "page": 2, "mask": "window(40, 0)"},
    "latent, documents": {**LATENT, "page": 16, "mask": "causal and q_pos // 64 == kv_idx // 64"},
    "latent, one warpgroup": {**LATENT, "knobs": "tile.kv = 32"},
    "latent in halves": {**LATENT, "dv": 256, "d": 256, "page": 16, "k": "i8", "v": "i8"},
}
#: Warps with keys of their own, which they convert in registers.
WARPS: Mapping[str, Any] = {"knobs": "warp_split = kv, tile.q = 16", "d": 128, "dv": 128}
KINDS_OF_WARPS: Mapping[str, Mapping[str, Any]] = {
    "warps, pages": {**WARPS, "page": 16},
    "warps, dense": {**WARPS, "q": "f16", "k": "i8", "v": "i8"},
    "warps, small pages": {**WARPS, "page": 4, "k": "e5m2", "v": "e5m2"},
    "warps, odd rows": {**WARPS, "d": 72, "dv": 40, "page": 16},
    "warps, odd rows in small pages": {**WARPS, "d": 40, "dv": 72, "page": 2, "q": "f16"},
    "warps, narrow rows": {**WARPS, "d": 64, "dv": 96, "knobs": f"{WARPS['knobs']}, stages = 3"},
    "warps, a window": {**WARPS, "mask": "window(40, 0)", "page": 32, "k": "i8", "v": "e5m2", "q": "f16"},
    "warps, documents": {**WARPS, "mask": "causal and q_pos // 64 == kv_idx // 64", "page": 16},
    "warps, keys alone": {**WARPS, "v": "bf16", "page": 16},
    "warps, values alone": {**WARPS, "k": "f16", "q": "f16", "v": "i8", "d": 64},
    "warps, keys alone in small pages": {**WARPS, "k": "i8", "v": "bf16", "page": 4},
    "warps, a scale of each key": {**WARPS, "scale": "vs[b, kv_idx, h]", "page": 16},
    "warps, lazy rescaling": {**WARPS, "knobs": f"{WARPS['knobs']}, softmax = online(rescale = lazy(4))"},
}
#: Scales of blocks of columns, which lie in pages beside the cache, or are one for all keys.
PAGED_BLOCKS = "ks[table[b, kv_idx // 16], kv_idx % 16, h // G, d // 32]"
KINDS_OF_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "blocks in pages": {
        "page": 16,
        "product": f"dot(q, k * {PAGED_BLOCKS})",
        "scale": "exp2(es[b, h // G, d // 16] - 127)",
        "more": ("input ks: f32[R, 16, Hkv, 2]", "input es: u8[B, Hkv, 4]"),
        "knobs": "tile.kv = 64, stages in {2, 1}",
    },
    "blocks in small pages": {
        "page": 2,
        "product": "dot(q, k * ks[table[b, kv_idx // 2], kv_idx % 2, h // G, d // 32])",
        "scale": "ks[table[b, kv_idx // 2], kv_idx % 2, h // G, d // 64]",
        "more": ("input ks: f32[R, 2, Hkv, 2]",),
    },
    "blocks, dense": {
        "product": "dot(q, k * ks[b, kv_idx, h // G, d // 48])",
        "more": ("input ks: bf16[B, N, Hkv, 3]",),
        "d": 136,
        "dv": 40,
        "k": "i8",
        "v": "f16",
        "q": "f16",
    },
    "blocks of values, window": {
        "scale": "ws[kv_idx, d // 32]",
        "more": ("input ws: f32[N, 2]",),
        "mask": "window(40, 0)",
        "page": 4,
        "v": "e5m2",
    },
    "warps, blocks in pages": {
        **WARPS,
        "page": 16,
        "product": "dot(q, k * ks[table[b, kv_idx // 16], kv_idx % 16, h // G, d // 32])",
        "scale": "ks[table[b, kv_idx // 16], kv_idx % 16, h // G, d // 64]",
        "more": ("input ks: f32[R, 16, Hkv, 4]",),
    },
    "warps, blocks of bytes, odd rows": {
        **WARPS,
        "d": 72,
        "dv": 40,
        "page": 2,
        "q": "f16",
        "k": "i8",
        "product": "dot(q, k * ks[b, kv_idx, h // G, d // 16])",
        "scale": "exp2(fs[kv_idx, d // 16] + gs[b] - 127)",
        "more": ("input ks: f16[B, N, Hkv, 5]", "input fs: u8[N, 3]", "input gs: i32[B]"),
    },
    "warps, blocks of powers of two": {
        **WARPS,
        "page": 16,
        "product": "dot(q, k * exp2(es[table[b, kv_idx // 16], kv_idx % 16, h // G, d // 32] - 127))",
        "scale": "exp2(es[table[b, kv_idx // 16], kv_idx % 16, h // G, d // 64] - 127)",
        "more": ("input es: u8[R, 16, Hkv, 4]",),
    },
    "warps, blocks of keys, documents": {
        **WARPS,
        "product": "dot(q, k * ks[b, kv_idx, h // G, d // 128])",
        "mask": "causal and q_pos // 64 == kv_idx // 64",
        "more": ("input ks: bf16[B, N, Hkv, 1]",),
        "v": "bf16",
    },
    "warps, blocks of values, window": {
        **WARPS,
        "scale": "ws[kv_idx, d // 32]",
        "more": ("input ws: f32[N, 4]",),
        "mask": "window(40, 0) and kv_idx % 7 != 3",
        "v": "e5m2",
        "k": "f16",
        "q": "f16",
    },
    "latent blocks": {
        **LATENT,
        "page": 16,
        "product": "dot(q, k * ks[table[b, kv_idx // 16], kv_idx % 16, d // 64])",
        "scale": "ks[table[b, kv_idx // 16], kv_idx % 16, d // 64]",
        "more": ("input ks: f32[R, 16, 3]",),
    },
    "latent blocks in halves": {
        **LATENT,
        "d": 256,
        "dv": 256,
        "product": "dot(q, k * ks[b, kv_idx, d // 128])",
        "scale": "ks[b, kv_idx, d // 128]",
        "more": ("input ks: f32[B, N, 2]",),
    },
}
KINDS = {**KINDS, **KINDS_OF_WARPS, **KINDS_OF_BLOCKS}
SIZES = ((1, 5, 3, 170), (2, 3, 40, 65))


def prompt_of(
    k: str = "e4m3",
    v: str = "e4m3",
    *,
    q: str = "bf16",
    page: int = 0,
    packed: bool = False,
    d: int = 64,
    dv: int = 64,
    mask: str = "causal",
    score: str = "dot(q, k) / 8",
    scale: str = "vs[h]",
    prefix: bool = False,
    more: tuple[str, ...] = (),
    knobs: str = "tile.kv = 32",
) -> str:
    """A prompt, of sequences in a tensor, packed, or in pages."""
    rows, keys = ("T, H" if packed else "B, M, H"), ("S, H" if packed and not page else "B, N, H")
    of_keys = f" via paged(table, page = {page})" if page else " via ragged(k_ends)" if packed else ""
    lines = [
        f"input q: {q}[{rows}, {d}]{' via ragged(q_ends)' if packed else ''}",
        f"input k: {k}[{keys}, {d}]{of_keys}",
        f"input v: {v}[{keys}, {dv}]{' via prefix(k)' if prefix else of_keys}",
        *(["input q_ends: i32[B + 1]"] if packed else []),
        *(["input k_ends: i32[B + 1]"] if packed and not page else []),
        *(["input table: i32[B, P]", "input lens: i32[B]", "length N = lens[b]"] if page else []),
        *(["input vs: f32[B, X, H]" if "kv_idx" in scale else "input vs: f32[H]"] if "vs[" in scale else []),
        *more,
        f"score = {score}",
        f"mask = {mask}",
        f"normalize = softmax(v_scale = {scale})",
        f"output o: {q}[{rows}, {dv}]",
        f"output lse: f32[{rows}]",
    ]
    return spec(lines, knobs, target="cuda.sm_90a")


LAZY = "softmax = online(maximum = lazy(20)), order = longest_first"
IN_TILES = "tile.kv = 32, convert = tiles"
PROMPTS: Mapping[str, Mapping[str, Any]] = {
    "prompt": {"knobs": IN_TILES},
    "prompt in pages": {"page": 16, "packed": True, "knobs": f"tile.kv = 64, {LAZY}"},
    "prompt in small pages": {"page": 4, "packed": True, "k": "i8", "v": "e5m2", "q": "f16"},
    "packed prompt": {"packed": True, "k": "e5m2", "v": "e5m2", "knobs": IN_TILES},
    "prompt, keys alone": {"v": "bf16", "page": 16},
    "prompt, values alone": {"k": "bf16", "v": "i8", "knobs": IN_TILES},
    "prompt, keys alone in small pages": {"k": "i8", "v": "bf16", "page": 4},
    "prompt, window": {"mask": "window(100, 0)", "knobs": f"{IN_TILES}, {LAZY}"},
    "prompt, documents": {"mask": "causal and q_pos // 64 == kv_idx // 64", "page": 16},
    "prompt, odd rows": {"d": 72, "dv": 40, "scale": "vs[h] * 2", "knobs": IN_TILES},
    "prompt, o through V": {"d": 128, "dv": 128, "knobs": f"convert = tiles, {LAZY}"},
    "prompt, wide rows": {"d": 256, "dv": 256, "knobs": "convert = tiles"},
    "prompt, a scale of each key": {
        "score": "dot(q, k) * ks[b, kv_idx, h] / 8",
        "more": ("input ks: f32[B, N, H]",),
        "knobs": IN_TILES,
    },
    "prompt, values in the keys": {"prefix": True, "dv": 48, "knobs": "tile.kv = 64, convert = tiles"},
    "prompt, bias of pairs": {
        "score": "dot(q, k) / 8 + bias[b, h, q_idx, kv_idx]",
        "more": ("input bias: bf16[B, H, M, N]",),
        "knobs": IN_TILES,
    },
    "prompt, scale of a query": {"scale": "vs[h] / (1 + q_idx)", "knobs": IN_TILES},
    "prompt, scale of v of each key": {
        "scale": "vs[b, kv_idx, h]",
        "knobs": f"tile.kv = 64, convert = tiles, {LAZY}",
        "q": "f16",
    },
    "prompt in pages, scales of each key": {
        "scale": "vs[b, kv_idx, h] * (1 + h)",
        "score": "dot(q, k) * ks[b, kv_idx, h] / 8",
        "more": ("input ks: f32[B, X, H]",),
        "page": 16,
        "packed": True,
        "mask": "window(90, 0)",
    },
}


WIDE = "loops = [kv], pack = gqa, convert = before"
#: Where K and V are converted before the kernel; scales of columns are of the sequence, head, key and block.
BEFORE: Mapping[str, Mapping[str, Any]] = {
    "before": {"knobs": f"tile.kv = 64, {LAZY}"},
    "before, packed": {"packed": True, "k": "e5m2", "v": "i8", "q": "f16"},
    "before, values alone": {"k": "bf16", "v": "i8", "d": 72, "dv": 40},
    "before, values in the keys": {"prefix": True, "dv": 48},
    "before, lengths": {
        "more": ("input lens: i32[B]", "length N = lens[b] + 1"),
        "knobs": f"tile.kv = 64, convert = before, {LAZY}",
    },
    "before, pages": {"page": 16, "knobs": f"tile.kv = 64, convert = before, {LAZY}", "v": "bf16"},
    "before, packed queries and pages": {"page": 4, "packed": True, "knobs": "convert = before", "k": "i8"},
    "before, pages of blocks": {
        "page": 32,
        "score": "dot(q, k * ks[table[b, kv_idx // 32], kv_idx % 32, h, d // 8]) / 8",
        "more": ("input ks: bf16[R, 32, H, 8]",),
        "mask": "window(90, 0)",
    },
    "before, dropout": {"scale": "vs[h], dropout = 0.25, seed = seed", "more": ("input seed: i64[]",)},
    "before, blocks of columns": {
        "score": "dot(q, k * ks[b, kv_idx, h, d // 32]) / 8",
        "scale": "es[b, kv_idx, h, d // 16]",
        "more": ("input ks: f32[B, N, H, 2]", "input es: f32[B, N, H, 4]"),
    },
    "before, packed blocks of columns": {
        "packed": True,
        "score": "dot(q, k * ks[b, kv_idx, h, d // 12]) / 8",
        "more": ("input ks: f32[B, X, H, 6]",),
        "q": "f16",
        "k": "i8",
    },
    "before, blocks of values in the keys": {
        "prefix": True,
        "dv": 32,
        "score": "dot(q, k * ks[k_first[b] + kv_idx, d // 8]) / 8",
        "scale": "ks[k_first[b] + kv_idx, d // 8]",
        "more": ("input ks: bf16[X, 8]", "input k_first: i32[B]"),
    },
    "before, columns of 16 bits": {
        "k": "bf16",
        "v": "bf16",
        "scale": "exp2(ws[d] - 127)",
        "more": ("input ws: u8[64]",),
    },
    "before, wide heads": {"d": 264, "dv": 264, "knobs": f"{WIDE}, split.kv = 2"},
    "before, wide heads in small pages": {
        "d": 272,
        "dv": 320,
        "page": 4,
        "q": "f16",
        "v": "i8",
        "knobs": WIDE,
    },
    "before, wide heads, packed, with blocks": {
        "d": 264,
        "dv": 288,
        "packed": True,
        "v": "bf16",
        "score": "dot(q, k * ks[b, kv_idx, h, d // 88]) / 8",
        "more": ("input ks: f32[B, X, H, 3]",),
        "knobs": WIDE,
    },
}


@cache
def subject(kind: str) -> Subject:
    text = text_of(**KINDS[kind]) if kind in KINDS else prompt_of(**{**PROMPTS, **BEFORE}[kind])
    (module,) = modules_of(text)
    return subject_of(module)


SIZES_OF_PROMPTS = (
    {"B": 1, "M": 140, "H": 2, "N": 300, "R": 64},
    {"B": 3, "M": 37, "H": 1, "N": 75, "R": 64},
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", some_by_day(PROMPTS, of=6))
def test_prompts_are_within_the_bound_and_have_the_bits_of_16(kind: str) -> None:
    made = subject(kind)
    for dims in SIZES_OF_PROMPTS:
        given = Case(dims={**dims, "X": dims["N"]}, logits="rising", seed=3)
        found = check(made, given, fills=("nan",))
        assert found.ok, found.message
        assert list(violations(made, given, only="8 bits equal 16")) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "kind", [x if n % 6 == 2 else pytest.param(x, marks=pytest.mark.nightly) for n, x in enumerate(BEFORE)]
)
def test_prompts_of_what_was_converted_before_have_the_bits_of_16(kind: str) -> None:
    made = subject(kind)
    assert made.plan is not None
    assert made.plan.conversion is not None
    for dims in SIZES_OF_PROMPTS:
        given = Case(dims={**dims, "X": dims["B"] * dims["N"]}, logits="rising", seed=3)
        found = check(made, given, fills=("nan",))
        assert found.ok, found.message
        assert list(violations(made, given, only="8 bits equal 16")) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["cuda.sm_90a", "triton"])
def test_other_inputs_have_gradients(target: str) -> None:
    """Of q, which wgmma makes on Hopper from copies of 16 bits, and of a scale for each head."""
    lines = [
        "input q: bf16[B, M, Hkv * G, 64]",
        "input k: e4m3[B, N, Hkv, 64]",
        "input v: i8[B, N, Hkv, 64]",
        "input temperature: f32[Hkv]",
        "score = dot(q, k) * temperature[h // G] / 8",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[B, M, Hkv * G, 64]",
        "grad q, temperature",
    ]
    (module,) = modules_of(spec(lines, "loops = [q, kv]", target=target))
    made = subject_of(module)
    found = check(
        made,
        Case(dims={"B": 2, "M": 70, "Hkv": 1, "G": 2, "N": 130}, logits="rising", seed=3),
        fills=("nan",),
    )
    assert found.ok, found.message
    assert module.backward is not None
    assert [planned.kind for planned in module.backward.kernels] == ["dq"]


def case(made: Subject, sizes: tuple[int, int, int, int], **changes: Any) -> Case:
    b, m, g, n = sizes
    m = min(m, made.configs[0].BLOCK_M // 2)  # two tiles of grouped rows
    heads = {} if made.variant.attention.v.storage.is_part else {"Hkv": 2}
    return Case(**{"dims": {"B": b, "M": m, "G": g, "N": n, "R": 64, **heads}, "logits": "rising", **changes})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "sizes"), some_by_day(KINDS, SIZES, of=18))
def test_outputs_are_within_the_bound(kind: str, sizes: tuple[int, int, int, int]) -> None:
    made = subject(kind)
    for config in range(0, len(made.configs), 2 if is_night() else 3):
        found = check(made, case(made, sizes, config=config, seed=config), fills=("nan",))
        assert found.ok, found.message


#: Those whose scales may differ between sequences that share a page.
SCALED_APART = {"blocks in pages", "blocks of values, window", "warps, blocks of bytes, odd rows"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=14))
def test_the_bits_are_those_of_16_bits(kind: str) -> None:
    made = subject(kind)
    assert made.plan is not None
    assert (narrow.twin_of(made, made.plan) is not None) == (kind not in SCALED_APART)
    for config in range(2):
        found = violations(made, case(made, SIZES[config], config=config), only="8 bits equal 16")
        assert list(found) == []


@pytest.mark.parametrize(
    "kind", each_by_day(["latent, odd rows, dense", "latent", "latent blocks in halves"], of=3)
)
def test_rows_of_8_bits_may_begin_at_any_multiple_of_8_bytes(kind: str) -> None:
    made = subject(kind)
    beside = TensorLayout(order=(0, 1, 2, 3), gaps=(0, 0, 0, 8), offset=8)
    for n in (70, 0):
        given = case(made, (2, 3, 20, n), lengths="drawn", layouts={"k": beside}, seed=n)
        found = check(made, given, fills=("nan",))
        assert found.ok, found.message
        assert list(violations(made, given, only="8 bits equal 16")) == []


def test_a_kernel_that_rounds_on_the_way_is_found() -> None:
    """Numbers of e4m3 to which something is added on the way have other bits."""
    made = subject("dense")
    assert made.plan is not None
    planted = "permute_bytes(word_of(low), word_of(high) + 65536u, 0x7632)"
    files = render_files(made.plan, path="a.attn", sha256="")
    name = next(name for name in files if name.endswith(".cu"))
    text = with_headers(files[name]).replace("permute_bytes(word_of(low), word_of(high), 0x7632)", planted)
    assert planted in text
    broken = replace(subject_of(made.plan, {name: text}), plan=made.plan)
    found = list(violations(broken, case(made, SIZES[0], config=1), only="8 bits equal 16"))
    assert found
    assert found[0].startswith("8 bits equal 16: config ")


LYING = {
    "neighbours that begin anywhere": TensorLayout(order=(0, 1, 2, 3), gaps=(0, 0, 3, 0), offset=1),
    "a column between them": TensorLayout(order=(0, 1, 2, 3), gaps=(0, 0, 0, 0), step=2),
    "heads between them": TensorLayout(order=(0, 1, 3, 2), gaps=(0, 0, 0, 0)),
    "one for all blocks": TensorLayout(order=(0, 1, 2, 3), gaps=(0, 0, 0, 0), expanded=(3,)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "lies"),
    some_by_day(["warps, blocks in pages", "warps, blocks of powers of two", "blocks in pages"], LYING, of=3),
)
def test_scales_may_lie_anyhow(kind: str, lies: str) -> None:
    made = subject(kind)
    name = "es" if "powers" in kind else "ks"
    found = check(made, case(made, SIZES[1], seed=1, layouts={name: LYING[lies]}), fills=("nan",))
    assert found.ok, found.message


def test_sums_that_come_while_p_is_read_are_found() -> None:
    made = subject("latent")
    assert made.plan is not None
    files = render_files(made.plan, path="a.attn", sha256="")
    name = next(name for name in files if name.endswith(".cu"))
    lines = with_headers(files[name]).splitlines()
    kept = [line for line in lines if "sums come in its place" not in line]
    assert len(kept) == len(lines) - 1
    broken = replace(subject_of(made.plan, {name: "\n".join(kept)}), plan=made.plan)
    orders = (case(made, SIZES[1], seed=seed) for seed in range(40))  # of warps: one in some six shows it
    assert not all(check(broken, given, fills=("nan",)).ok for given in orders)


def test_a_scale_that_is_rounded_is_found() -> None:
    made = subject("before, blocks of columns")
    assert made.plan is not None
    files = render_files(made.plan, path="a.attn", sha256="")
    name = next(name for name in files if name.endswith(".cu"))
    text = with_headers(files[name]).replace("x[j] *= of_columns;", "x[j] *= of_columns * 1.00390625f;")
    assert text != with_headers(files[name])
    broken = replace(subject_of(made.plan, {name: text}), plan=made.plan)
    given = Case(dims={**SIZES_OF_PROMPTS[1], "X": 75}, logits="rising", seed=3)
    assert list(violations(broken, given, only="8 bits equal 16")) != []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "q"), some_by_day(NARROW, ("bf16", "f16"), of=2))
def test_every_code_becomes_its_number(dtype: DType, q: str) -> None:
    """Of one key o is the value."""
    (module,) = modules_of(text_of(dtype, dtype, q=q, splits="1", scale="1"))
    made = subject_of(module)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(DTYPES[dtype])
    v = codes.view(torch.uint8).reshape(1, 1, 4, 64).view(DTYPES[dtype])
    queries = torch.zeros(1, 1, 4, 64, dtype=DTYPES[q])
    k = torch.zeros(1, 1, 4, 64, dtype=torch.int8).view(DTYPES[dtype])
    inputs = {"q": queries, "k": k, "v": v, "lens": torch.ones(1, dtype=torch.int32)}
    inputs |= {"vs": torch.ones(4)} if "vs" in [t.name for t in made.variant.attention.inputs] else {}
    outputs = made.blank(inputs)
    made.run(inputs, outputs)
    expected = codes.to(DTYPES[q])
    found = outputs["o"].flatten()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["blocks in small pages", "warps, blocks in pages"])
def test_scales_behind_the_last_key_may_be_nan(kind: str) -> None:
    """Numbers there are 0 or become it, and 0 * NaN is NaN."""
    made = subject(kind)
    dims = {"B": 2, "M": 1, "G": 4, "N": 170, "Hkv": 2, "R": 200}
    inputs = build(made.variant.attention, Case(dims=dims, lengths="drawn", seed=2)).inputs
    results = []
    for junk in (0.5, torch.nan):
        given = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        seen = torch.zeros(given["ks"].shape[:2], dtype=torch.bool)
        for b, length in enumerate(given["lens"].tolist()):
            keys = torch.arange(length)
            seen[given["table"][b, keys // seen.shape[1]].long(), keys % seen.shape[1]] = True
        assert not seen.all()
        given["ks"][~seen] = junk
        outputs = made.blank(given)
        made.run(given, outputs)
        results.append(outputs["o"])
    assert results[0].isfinite().all()
    assert torch.equal(*results)


def test_lengths_that_end_before_the_first_tile_and_junk_behind_them() -> None:
    """The first tile is copied before the length is known; what lies behind it is NaN."""
    for kind in ("pages", "dense", "latent"):
        made = subject(kind)
        for lengths in ("tiles", "full"):
            for special in ("nan_v", "inf_k"):
                given = case(made, (3, 2, 3, 70), special=special, lengths=lengths)
                found = check(made, given, fills=("nan",))
                assert found.ok, found.message
