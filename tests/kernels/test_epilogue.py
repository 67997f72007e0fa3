"""Epilogues: gates of rows and of elements, norms and residuals, with gradients of all that they read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from attnc.verify.case import Case
from tests.by_day import each_by_day, some_by_day
from tests.targets import EACH, needs_gxx, skip_without_compiler, small_decode_tiles, small_tiles
from tests.verify.judging import assert_within_bound, right_by_day, spec, subject_of_text, transposed

GATE = (
    "input q: bf16[B, M, Hkv * G, 16]",
    "input k, v: bf16[B, N, Hkv, 16]",
    "input gate: bf16[B, M, Hkv * G, 16]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = softmax",
    "output o: bf16[B, M, Hkv * G, 16] = sigmoid(gate[b, q_idx, h, d]) * attention",
    "grad q, k, v, gate",
)
#: A gate of rows, weights of columns, of heads and columns, and of all; a residual; a column's half; lengths.
FINISHED = (
    "tanh(gate[b, h, q_idx]) * attention * weight[d] / (1 + attention * attention)"
    " + s * table[h, d // 2] + residual[b, q_idx, h, d] * table[h, d]"
)
ALL = (
    "input q: f16[B, M, H, 24]",
    "input k, v: f16[B, N, H, 24]",
    "input gate: f32[B, H, M]",
    "input weight: f32[24]",
    "input table: f16[H, 24]",
    "input s: f32[]",
    "input residual: f16[B, M, H, 24]",
    "input rows: i32[B]",
    "length M = rows[b]",
    "score = dot(q, k) / sqrt(D)",
    "mask = window(5, 3)",
    "normalize = softmax(sink = 0)",
    f"output o: f16[B, M, H, 24] = {FINISHED}",
    "output lse: f32[B, H, M]",
    "grad q, k, v, gate, weight, table, residual, s",
)
PACKED = (
    "input q: bf16[T, H, 16] via ragged(ends)",
    "input k, v: bf16[T, H, 16] via ragged(ends)",
    "input ends: i32[B + 1]",
    "input gate: bf16[T, H]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = softmax",
    "output o: bf16[T, H, 16] = sigmoid(gate[ends[b] + q_idx, h]) * attention",
    "grad q, k, v, gate",
)
#: o is divided by more than the sum of a row.
BESIDE_A_SINK = (
    *(line.replace("softmax", "softmax(sink = sink[h], dropout = p, seed = seed)") for line in GATE),
    "input sink: f32[Hkv * G]",
    "input p: f32[]",
    "input seed: i64[]",
)


KINDS = {"gate": GATE, "all": ALL}
#: Splits, and one for all keys.
SPLITS = "loops = [kv], pack = gqa, split.kv in {1, 3}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "target"), some_by_day(KINDS, EACH, of=2))
def test_epilogue(kind: str, target: str) -> None:
    skip_without_compiler(target)
    right_by_day(subject_of_text(spec(KINDS[kind], small_tiles(target), target=target)), count=2)


@pytest.mark.parametrize("target", EACH)
def test_a_tile_may_have_more_columns_than_a_gate(target: str) -> None:
    """Triton's tiles of v, and so those of o, are as wide as k's."""
    skip_without_compiler(target)
    wider = (
        "input q: bf16[B, M, Hkv * G, 32]",
        "input k: bf16[B, N, Hkv, 32]",
        "input v: bf16[B, N, Hkv, 16]",
    )
    made = subject_of_text(spec((*wider, *GATE[2:]), small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 1, "M": 5, "N": 7, "Hkv": 1, "G": 1}))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
def test_gate_of_packed_rows(target: str) -> None:
    skip_without_compiler(target)
    made = subject_of_text(spec(PACKED, small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 3, "M": 21, "N": 21, "H": 2}))


#: Without a gradient of q, a kernel of its own reads the attention of rows, those past a length included.
CUT = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16]",
    "input rows: i32[B]",
    "length M = rows[b]",
    "score = dot(q, k)",
    "normalize = softmax",
    "output o: bf16[B, M, H, 16] = attention + 0.4",
    "grad k, v",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", EACH)
def test_the_attention_of_rows_past_a_length_is_kept_as_zeros(target: str) -> None:
    skip_without_compiler(target)
    made = subject_of_text(spec(CUT, small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 2, "M": 45, "N": 3, "H": 1}, seed=3))


#: Elements that numbers of columns, of rows, and of both find, through one load or two, and by arithmetic.
FOUND_O = (
    "sigmoid(w[rows[b, q_idx], d]) * attention + x[perm[perm[d]], 15 - d] + u[max(perm[d], 0) % 7]"
    " + x[perm[d], rows[b, q_idx]] * u[rows[b, q_idx]] + w[perm[d], d // 2] * y[h, perm[d] + q_pos, d]"
)
FOUND = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16]",
    "input perm: i32[16]",
    "input rows: i32[B, M]",
    "input w: bf16[R, 16]",
    "input x: f32[R, 16]",
    "input u: f32[R]",
    "input y: f32[H, R, 16]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = softmax",
    f"output o: bf16[B, M, H, 16] = {FOUND_O}",
    "grad q, k, v, w, x, u, y",
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", [*EACH, pytest.param("cuda.sm_90a", marks=needs_gxx)])
def test_elements_that_columns_and_rows_find(target: str) -> None:
    """Each sum of a gradient knows where it goes: also that of a column, whose index is loaded."""
    skip_without_compiler(target)
    is_hopper = target == "cuda.sm_90a"
    lines = (
        tuple(line.replace("16]", "64]").replace("15 -", "63 -") for line in FOUND) if is_hopper else FOUND
    )
    made = subject_of_text(spec(lines, "" if is_hopper else small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 2, "H": 2, "M": 21, "N": 33, "R": 9}))


@needs_gxx
@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["loops = [q, kv]", SPLITS])
def test_rows_that_a_number_of_each_query_finds(schedule: str) -> None:
    """Of two rows of 16 bits Hopper copies the first ahead, and loads the other two columns at a time."""
    made = "sigmoid(w[rows[b, q_idx], d]) * attention + x[places[b, q_pos], d]"
    lines = (
        "input q: bf16[B, M, Hkv * G, 64]",
        "input k, v: bf16[B, N, Hkv, 64]",
        "input rows: i32[B, M]",
        "input places: i32[B, N]",
        "input w, x: bf16[R, 64]",
        "score = dot(q, k) / sqrt(D)",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[B, M, Hkv * G, 64] = {made}",
    )
    subject = subject_of_text(spec(lines, schedule, target="cuda.sm_90a"))
    for config in range(len(subject.configs)):
        dims = {"B": 2, "Hkv": 1, "G": 2, "M": 21, "N": 33, "R": 9}
        assert_within_bound(subject, Case(dims=dims, config=config))


@pytest.mark.one_in(3)
@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", each_by_day(["all", "beside a sink", "gate", "of small sums", "packed"], of=2)
)
def test_epilogue_on_hopper(kind: str) -> None:
    kinds = {**KINDS, "packed": PACKED, "beside a sink": BESIDE_A_SINK, "of small sums": GATE}
    lines, headroom = kinds[kind], 80 if kind == "of small sums" else 12
    wide = tuple(line.replace("16]", "64]").replace("24]", "64]") for line in lines)
    schedule = f"softmax = online(maximum = lazy({headroom}))"
    made = subject_of_text(spec(wide, schedule, target="cuda.sm_90a"))
    rows = {"M": 21, "N": 21} if kind == "packed" else {"M": 70, "N": 133}
    assert_within_bound(made, Case(dims={"B": 2, "H": 2, "Hkv": 1, "G": 2, **rows}))


@needs_gxx
@pytest.mark.parametrize("extras", each_by_day(["far", "drawn"], of=2))
def test_rows_of_any_stride_are_copied_ahead(extras: str) -> None:
    """24 columns of the 32 that are multiplied, of rows that begin anywhere; sigmoids by one reciprocal."""
    lines = tuple(line.replace("16]", "24]") for line in GATE)
    made = subject_of_text(spec(lines, "softmax = online(maximum = lazy(12))", target="cuda.sm_90a"))
    dims = {"B": 2, "M": 70, "N": 33, "Hkv": 1, "G": 2}
    for layouts in ({}, transposed(made.variant.attention)):
        assert_within_bound(made, Case(dims=dims, layouts=layouts, extras=extras))


#: Few queries of several heads, whose rows lie apart; of a cache in pages; positions, lengths, columns.
DECODED_O = (
    "sigmoid(gate[b, q_idx, h, d]) * attention + weight[d] * log(2 + N) + 0.01 * (q_pos % 3) + h * one"
)
DECODED = (
    "input q: bf16[B, M, Hkv * G, 16]",
    "input k, v: bf16[B, N, Hkv, 16] via paged(table, page = 16)",
    "input table: i32[B, P]",
    "input keys, rows: i32[B]",
    "input gate: bf16[B, M, Hkv * G, 16]",
    "input weight: f32[16]",
    "input one: f32[]",
    "length N = keys[b]",
    "length M = rows[b]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = {}",
    f"output o: bf16[B, M, Hkv * G, 16] = {DECODED_O}",
)


def assert_decodes(lines: Iterable[str], tiles: str, target: str) -> None:
    made = subject_of_text(spec(lines, f"{SPLITS}{tiles}", target=target))
    for number in range(len(made.configs)):
        dims = {"B": 3, "Hkv": 2, "G": 3, "M": 5, "N": 70}
        assert_within_bound(made, Case(dims=dims, seed=number, config=number))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("form", ["softmax", "softpick", "none", "stick_breaking"])
@pytest.mark.parametrize("target", EACH)
def test_rows_of_several_heads_and_joined_splits(target: str, form: str) -> None:
    skip_without_compiler(target)
    tiles = small_decode_tiles(target)
    if form == "stick_breaking":
        tiles = tiles.replace("warp_split = kv", "tile.q = 32")
    assert_decodes([line.replace("{}", form) for line in DECODED], f", {tiles}", target)


@pytest.mark.nightly
@needs_gxx
@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize("form", ["softmax", "softpick", "none", "stick_breaking"])
@pytest.mark.parametrize("width", [40, 128])
def test_decoding_on_hopper(width: int, form: str) -> None:
    lines = [line.replace("{}", form).replace("16]", f"{width}]") for line in DECODED]
    assert_decodes(lines, ", tile.kv = 32", "cuda.sm_90a")


#: A gate, and a number for each row, of more columns than a warpgroup has.
WIDE_O = "sigmoid(gate[b, q_idx, h, d]) * attention / (1 + row[b, q_idx, h] * row[b, q_idx, h])"
WIDE = (
    "input q: bf16[B, M, Hkv * G, 320]",
    "input k, v: bf16[B, N, Hkv, 320]",
    "input gate: bf16[B, M, Hkv * G, 320]",
    "input row: f32[B, M, Hkv * G]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = softmax",
    f"output o: bf16[B, M, Hkv * G, 320] = {WIDE_O}",
    "grad q, k, v, gate, row",
)


@pytest.mark.nightly
@needs_gxx
@pytest.mark.slow
def test_wide_heads_on_hopper() -> None:
    """Two warpgroups share the columns of o, of which some are not stored; gradients of all."""
    made = subject_of_text(spec(WIDE, SPLITS, target="cuda.sm_90a"))
    for number, rows in enumerate((70, 3)):
        dims = {"B": 1, "Hkv": 1, "G": 2, "M": rows, "N": 100}
        layouts = transposed(made.variant.attention) if number else {}
        assert_within_bound(made, Case(dims=dims, config=number, layouts=layouts))


@pytest.mark.one_in(4)
@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("d", "schedule"), [(72, SPLITS), (112, SPLITS), (200, "loops = [q, kv]")])
def test_rows_of_no_multiple_of_32_columns(d: int, schedule: str) -> None:
    """What is left of a row behind chunks of four lanes is loaded in pairs, and nothing behind its end."""
    lines = (
        f"input q, gate: bf16[B, M, Hkv * G, {d}]",
        f"input k, v: bf16[B, N, Hkv, {d}]",
        "score = dot(q, k) / sqrt(D)",
        "normalize = softmax",
        f"output o: bf16[B, M, Hkv * G, {d}] = sigmoid(gate[b, q_idx, h, d]) * attention",
    )
    made = subject_of_text(spec(lines, schedule, target="cuda.sm_90a"))
    for number, rows in enumerate((70, 3)):
        dims = {"B": 1, "Hkv": 1, "G": 2, "M": rows, "N": 50}
        layouts = transposed(made.variant.attention) if number else {}
        assert_within_bound(made, Case(dims=dims, config=number % len(made.configs), layouts=layouts))


def test_the_attention_itself_is_written_if_it_is_wanted() -> None:
    made = subject_of_text(spec(GATE, small_tiles("triton")))
    q, k, v = (torch.randn(1, 20, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    gate, attention = torch.randn_like(q), torch.empty_like(q)
    o = made.function(q, k, v, gate, attention=attention)
    expected = (gate.float().sigmoid() * attention.float()).to(torch.bfloat16)
    torch.testing.assert_close(o, expected, rtol=2**-6, atol=2**-8)
    with pytest.raises(ValueError, match="attention: cannot be given where a gradient is wanted"):
        made.function(q.requires_grad_(), k, v, gate, attention=attention)
