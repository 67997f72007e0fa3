"""Decode kernels for Hopper on the CPU, thread by thread: masks and scores, one warpgroup and two."""

from __future__ import annotations

from functools import cache

import pytest

from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import Subject, subject_of
from tests.by_day import some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec

pytestmark = [needs_gxx, pytest.mark.slow]


def text_of(
    mask: str = "causal",
    *,
    shared: bool = False,
    rest: int = 64,
    width: int = 128,
    page: int = 0,
    score: str = "dot(q, k) / sqrt(64)",
    normalize: str = "softmax",
    schedule: str = "",
    splits: str = "auto, 3",
    dtype: str = "bf16",
    more: tuple[str, ...] = (),
) -> str:
    """shared: one KV head, for two warpgroups, whose first `width` columns are the values, with `rest` more;
    else heads with K and V of 64.
    """
    paged = f" via paged(table, page = {page})" if page else ""
    if shared:
        q, o = f"{dtype}[B, M, G, {width + rest}]", f"{dtype}[B, M, G, {width}]"
        keys = [
            f"input k: {dtype}[B, N, 1, {width + rest}]{paged}",
            f"input v: {dtype}[B, N, 1, {width}] via prefix(k)",
        ]
    else:
        q = o = f"{dtype}[B, M, Hkv * G, 64]"
        keys = [f"input k, v: {dtype}[B, N, Hkv, 64]{paged}"]
    lines = [
        f"input q: {q}",
        *keys,
        *(["input table: i32[B, P]"] if page else []),
        "input lens: i32[B]",
        "length N = lens[b]",
        *more,
        f"score = {score}",
        f"mask = {mask}",
        f"normalize = {normalize}",
        f"output o: {o}",
        f"output lse: f32[B, {'G' if shared else 'Hkv * G'}, M]",
    ]
    consumers = "consumers = 2, " if shared else ""
    knobs = f"loops = [kv], pack = gqa, {consumers}tile.kv = 32, stages = 2, split.kv in {{{splits}}}"
    return spec(lines, f"{knobs}\n  {schedule}", target="cuda.sm_90a")


KINDS = {
    "two": text_of(shared=True, page=16, dtype="f16"),
    "two_lazily": text_of(
        "window(40, 0)",
        shared=True,
        score="softcap(dot(q, k) / sqrt(192), 30)",
        schedule="softmax = online(rescale = lazy(8))",
    ),
    "halves": text_of(shared=True, width=256, page=16, splits="2"),
    "halves_alone": text_of(shared=True, width=256, rest=0, splits="1", schedule="tile.d = 128"),
    "dense": text_of(splits="3, 7"),
    "fixed": text_of(page=16, splits="3, fixed(64)"),
    "sink": text_of(
        "window(40, 0)", page=32, normalize="softmax(sink = sink[h])", more=("input sink: f32[Hkv * G]",)
    ),
    "bias": text_of(
        "causal and q_pos // 64 == kv_idx // 64",
        score="dot(q, k) / 8 + bias[b, kv_idx] - slope[h] * (q_pos - kv_idx)",
        more=("input bias: f32[B, N]", "input slope: f32[Hkv * G]"),
        dtype="f16",
    ),
}


@cache
def subject(kind: str) -> Subject:
    (module,) = modules_of(KINDS[kind])
    return subject_of(module)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "sizes"), some_by_day(KINDS, [(1, 5, 3, 170), (2, 3, 40, 65)], of=6))
def test_masks_and_scores_are_right(kind: str, sizes: tuple[int, int, int, int]) -> None:
    b, m, g, n = sizes
    heads = {} if kind.startswith(("two", "halves")) else {"Hkv": 2}
    for config in range(len(subject(kind).configs)):
        case = Case(dims={"B": b, "M": m, "G": g, "N": n, **heads}, logits="rising", config=config)
        found = check(subject(kind), case, fills=("nan",))
        assert found.ok, found.message


def test_pages_of_more_tiles_than_lanes_have_at_once() -> None:
    (module,) = modules_of(text_of(page=8, splits="1, 2"))
    made = subject_of(module)
    for config in range(2):
        case = Case(dims={"B": 2, "M": 1, "G": 3, "Hkv": 1, "N": 600}, logits="rising", config=config)
        found = check(made, case, fills=("nan",))
        assert found.ok, found.message


def test_wide_values_are_summed_in_parts() -> None:
    """Two blocks on a multiprocessor leave a thread too few registers to start with for one product."""
    lines = [
        "input q: bf16[B, M, G, 16]",
        "input k: bf16[B, N, 1, 16]",
        "input v: bf16[B, N, 1, 256]",
        "score = dot(q, k)",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[B, M, G, 256]",
    ]
    (module,) = modules_of(spec(lines, "loops = [kv], pack = gqa, tile.kv = 32", target="cuda.sm_90a"))
    found = check(subject_of(module), Case(dims={"B": 1, "G": 3, "M": 2, "N": 70}), fills=("nan",))
    assert found.ok, found.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", ["3", "1"])
def test_rows_that_a_sequence_has_not_are_zeros_beside_values_that_are_nan(splits: str) -> None:
    """Splits are joined without them, with a weight of 0, and 0 * NaN is NaN."""
    more = ("input rows: i32[B]", "length M = rows[b]")
    (module,) = modules_of(text_of("kv_idx < N", splits=splits, more=more))
    made = subject_of(module)
    for lengths in ("tiles", "full"):  # as many rows as keys, at most: fewer than five
        case = Case(dims={"B": 3, "M": 5, "G": 2, "N": 2, "Hkv": 2}, special="nan_v", lengths=lengths)
        found = check(made, case, fills=("nan",))
        assert found.ok, found.message
