"""Masks whose test of a tile reads a sorted input: what it reads there belongs to the tile at hand."""

from __future__ import annotations

import pytest
import torch

from attnc.expr.nodes import Search
from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.subject import subject_of
from attnc.verify.tolerance import expect
from attnc.verify.verdict import judge
from tests.by_day import each_by_day
from tests.plan.sorted_masks import LINES, MASKS, nodes, text_of
from tests.targets import EACH, skip_without_compiler, small_tiles
from tests.verify.judging import assert_within_bound, modules_of, spec, subject_of_text

_SIZES = {"B": 1, "M": 37, "N": 50, "H": 2}


#: Every mask with queries outside, and each other kind of kernel with some of them.
RUNS = [
    *((mask, "rows") for mask in MASKS),
    *((mask, order) for n, mask in enumerate(MASKS) for order in [["keys", "decode", "gradients"][n % 3]]),
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("mask", "order"), RUNS)
def test_triton(mask: str, order: str) -> None:
    assert_within_bound(subject_of_text(text_of(mask, order, "triton")), Case(dims=_SIZES, seed=5))


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "order"), [(MASKS[0], "rows"), (MASKS[1], "decode"), (MASKS[5], "gradients")]
)
def test_cuda(mask: str, order: str) -> None:
    skip_without_compiler("cuda.sm_80")
    assert_within_bound(subject_of_text(text_of(mask, order, "cuda.sm_80")), Case(dims=_SIZES, seed=5))


@pytest.mark.slow
@pytest.mark.parametrize("mask", each_by_day([MASKS[4], MASKS[0], MASKS[7]], of=3))
def test_rows_of_64_bits_on_hopper(mask: str) -> None:
    """Whoever walks over the tiles of keys tests them by values of the queries' first and last row."""
    skip_without_compiler("cuda.sm_90a")
    lines = (line.replace("i32", "i64").replace("B, N] is", "B, X] is") for line in LINES)
    schedule = "consumers = 2, tile.kv = 32\n  backward { accumulate.dq = two_pass }"
    text = spec((*lines, f"mask = {mask}", "grad q, k, v"), schedule, target="cuda.sm_90a")
    assert_within_bound(
        subject_of_text(text), Case(dims={"B": 2, "M": 150, "N": 90, "H": 1, "X": 160}, seed=5)
    )


def _right_in_rows_of_their_own(mask: str, target: str) -> None:
    """The outputs, where each row of `doc` ascends at another pace."""
    lines = (*LINES, "input at: i32[B]", f"mask = {mask}")
    (module,) = modules_of(spec(lines, small_tiles(target), target=target))
    assert any(isinstance(node, Search) for item in module.kernel.regions.bounds for node in nodes(item))
    made = subject_of(module)
    problem = build(made.variant.attention, Case(dims={**_SIZES, "B": 3}, seed=5), device=made.device)
    doc = torch.arange(50) // torch.tensor([[3], [10], [17]])
    at = torch.tensor([2, 7, -1])
    inputs = {**problem.inputs, "doc": doc.to(torch.int32), "at": at.to(torch.int32)}
    made.run(inputs, problem.outputs)
    verdict = judge(
        made.variant.attention, expect(made.variant.attention, inputs, made.bound), problem.outputs
    )
    assert verdict.ok, verdict.message


@pytest.mark.one_in(10)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("value", ["3", "h + 1", "b + 1", "q_idx // 8"])
def test_each_sequence_searches_its_own_row(value: str, target: str) -> None:
    skip_without_compiler(target)
    _right_in_rows_of_their_own(f"doc[b, kv_idx] >= {value}", target)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("row", ["b + 1", "at[b]", "(b + 1) % 3", "h", "b - 900"])
def test_rows_by_other_indices(row: str, target: str) -> None:
    """Rows outside of the tensor read 0. They are not searched: that would be memory of something else."""
    skip_without_compiler(target)
    for mask in (f"doc[{row}, kv_idx] <= q_idx % 2 - 1", f"doc[{row}, kv_idx] >= q_idx - 20"):
        _right_in_rows_of_their_own(mask, target)


_LENGTHS = (
    *("input x: i32[N] is sorted", "input y: i32[M] is sorted", "input n, m: i32[B]"),
    *("length N = n[b]", "length M = m[b]"),
)


_LAST_KEY, _LAST_QUERY = "x[kv_idx] >= q_idx and y[q_idx] >= kv_idx", "y[q_idx] <= kv_idx"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("target", "mask", "schedule"),
    [
        ("triton", _LAST_KEY, ""),
        ("triton", _LAST_KEY, "backward { accumulate.dq = sequential }"),
        ("triton", _LAST_QUERY, ""),
        ("cuda.sm_80", _LAST_QUERY, ""),
        pytest.param(
            *("cuda.sm_90a", _LAST_QUERY, "backward { accumulate.dq = two_pass }"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_tile_ends_where_its_sequence_does(target: str, mask: str, schedule: str) -> None:
    """A tile's last row is that of the shortened sequence: its value is the largest that counts."""
    skip_without_compiler(target)
    tiles = "consumers = 2, tile.kv = 32" if target == "cuda.sm_90a" else small_tiles(target)
    lines = (*LINES[:2], *LINES[3:], *_LENGTHS, f"mask = {mask}", "grad q, k, v")
    made = subject_of_text(spec(lines, f"{tiles}\n  {schedule}", target=target))
    for sizes, seed in (((37, 50), 1), ((60, 40), 0)):
        assert_within_bound(made, Case(dims={"B": 2, "M": sizes[0], "N": sizes[1], "H": 1}, seed=seed))
