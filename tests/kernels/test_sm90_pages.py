"""Pages of any size on Hopper, thread by thread on the CPU: rows that are copied one by one, for prompts and
for decoding. Memory behind the last key, and what no page holds, is NaN.
"""

from __future__ import annotations

from functools import cache

import pytest

from attnc.verify.case import Case, TensorLayout
from attnc.verify.check import check
from attnc.verify.subject import Subject
from tests.by_day import some_by_day
from tests.kernels.test_sm90_decode import text_of as decode_text
from tests.targets import needs_gxx
from tests.verify.judging import spec, subject_of_text

pytestmark = [needs_gxx, pytest.mark.slow]

LAZY = "softmax = online(maximum = lazy(20))"


def text_of(
    page: int,
    *,
    d: int = 64,
    dv: int = 0,
    tile: int = 32,
    mask: str = "causal",
    score: str = "",
    normalize: str = "softmax",
    more: tuple[str, ...] = (),
    schedule: str = "consumers = 2",
    dtype: str = "bf16",
) -> str:
    """A prompt over pages, whose heads come in groups."""
    dv = dv or d
    lines = [
        f"input q: {dtype}[B, M, Hkv * G, {d}]",
        f"input k: {dtype}[B, N, Hkv, {d}] via paged(table, page = {page})",
        f"input v: {dtype}[B, N, Hkv, {dv}] via paged(table, page = {page})",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "length N = lens[b]",
        *more,
        f"score = {score or f'dot(q, k) / sqrt({d})'}",
        f"mask = {mask}",
        f"normalize = {normalize}",
        f"output o: {dtype}[B, M, Hkv * G, {dv}]",
    ]
    return spec(lines, f"tile.kv = {tile}, stages = 2, {schedule}", target="cuda.sm_90a")


KINDS = {
    "one": text_of(1, schedule=f"consumers = 2, {LAZY}"),
    "two": text_of(2, d=96, dv=80, tile=48, mask="window(40, 3)", dtype="f16"),
    "twenty": text_of(20, d=256, tile=64),
    "twelve": text_of(12, d=16, tile=144),
    "three_warpgroups": text_of(1, d=32, tile=64, mask="causal or kv_idx < 70", schedule="consumers = 3"),
    "not_overlapped": text_of(4, schedule="consumers = 2, overlap = false"),
    "columns_of_keys": text_of(
        1,
        score="dot(q, k) / 8 + bias[b, kv_idx]",
        more=("input bias: f32[B, N]",),
        schedule=f"consumers = 2, {LAZY}",
    ),
    "values_of_keys": text_of(3, tile=112, mask="bias[b, kv_idx] < 1", more=("input bias: f32[B, N]",)),
    "dropout": text_of(
        4, more=("input p: f32[]", "input seed: i64[]"), normalize="softmax(dropout = p, seed = seed)"
    ),
    "skipped_tiles": text_of(
        4, mask="causal and (q_pos // 64 == kv_idx // 64 or kv_idx % 128 < 16)", schedule="consumers = 2"
    ),
    "pairs": text_of(
        5, score="dot(q, k) / 8 + bias[q_idx, kv_idx]", more=("input bias: f32[M, N]",), dtype="f16"
    ),
    "decode": decode_text(page=1),
    "decode_fixed": decode_text(page=4, splits="3, fixed(64)"),
    "decode_sink": decode_text(
        "window(40, 0)", page=20, normalize="softmax(sink = sink[h])", more=("input sink: f32[Hkv * G]",)
    ),
    "decode_skips": decode_text(
        "causal and q_pos // 64 == kv_idx // 64",
        page=12,
        score="dot(q, k) / 8 + bias[b, kv_idx] - slope[h] * (q_pos - kv_idx)",
        more=("input bias: f32[B, N]", "input slope: f32[Hkv * G]"),
        dtype="f16",
    ),
    "latent": decode_text(shared=True, page=1, dtype="f16"),
    "latent_window": decode_text(
        "window(40, 0)", shared=True, page=2, schedule="softmax = online(rescale = lazy(8))"
    ),
    "latent_halves": decode_text(shared=True, width=256, page=4, splits="2"),
    "latent_quarters": decode_text(shared=True, width=512, page=1, splits="1", schedule="tile.d = 128"),
}


@cache
def subject(kind: str) -> Subject:
    return subject_of_text(KINDS[kind])


#: B, M, G and N: many tiles of keys; blocks with several tiles of queries, of which some see no key.
SIZES = ((1, 5, 3, 170), (2, 130, 1, 70))


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("kind", "number"), some_by_day(KINDS, range(len(SIZES)), of=4))
def test_rows_are_those_of_their_pages(kind: str, number: int) -> None:
    made, (b, m, g, n) = subject(kind), SIZES[number]
    heads = {} if kind.startswith("latent") else {"Hkv": 2}
    case = Case(
        dims={"B": b, "M": m, "G": g, "N": n, **heads},
        logits="rising",
        config=number % len(made.configs),
        seed=number,
    )
    found = check(made, case, fills=("nan",))
    assert found.ok, found.message


@pytest.mark.one_in(4)
@pytest.mark.parametrize("lengths", ["empty", "one", "full"])
@pytest.mark.parametrize("kind", ["one", "decode"])
def test_no_page_behind_the_last_key_is_read(kind: str, lengths: str) -> None:
    case = Case(dims={"B": 2, "M": 3, "G": 2, "Hkv": 1, "N": 50}, lengths=lengths)
    found = check(subject(kind), case, fills=("nan",))
    assert found.ok, found.message


def test_pools_that_cannot_be_copied_in_pieces_of_16_bytes_are_copied_first() -> None:
    order = (0, 1, 2, 3)
    layouts = {
        "k": TensorLayout(order=order, gaps=(0, 0, 0, 0), offset=3),
        "v": TensorLayout(order=order, gaps=(0, 0, 0, 5)),
    }
    case = Case(dims={"B": 2, "M": 3, "G": 2, "Hkv": 2, "N": 50}, layouts=layouts)
    for kind in ("one", "decode"):
        found = check(subject(kind), case, fills=("nan",))
        assert found.ok, found.message
