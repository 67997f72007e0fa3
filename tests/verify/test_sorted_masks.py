"""Masks whose test of a tile reads a sorted input: what it reads there belongs to the tile at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from attnc.expr.nodes import Compare, Expr, Index, Search, walk
from attnc.plan.ir import Decode, Forward, Let, Loop, Statement, statement_expressions
from attnc.plan.verify import verify_module
from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.subject import subject_of
from attnc.verify.tolerance import expect, judge
from tests.plan.planning import planned
from tests.targets import EACH, skip_without_compiler, small_tiles
from tests.verify.judging import modules_of, right, spec, subject_of_text

_SAME = "doc[b, q_pos] == doc[b, kv_idx]"
MASKS = (
    f"first(20) or {_SAME}",
    f"window(30, 0) or {_SAME}",
    "kv_idx < 4 or doc[b, kv_idx] >= 3",
    f"where(h % 2 == 0, {_SAME}, kv_idx <= q_idx)",
    "doc[b, kv_idx] % 2 == doc[b, q_idx] % 2",
    f"q_idx < 4 or {_SAME}",
    f"not ({_SAME}) and kv_idx % 3 != 0",
    "ages[b, doc[b, kv_idx]] % 2 == ages[b, doc[b, q_pos]] % 2",
    "doc[doc[b, 9], kv_idx] == doc[b, q_pos] % 2 or kv_idx < 5",
)
_LINES = (
    "input q: f16[B, M, H, 16]",
    "input k, v: f16[B, N, H, 16]",
    "input doc, ages: i32[B, N] is sorted",
    "score = dot(q, k) / 4",
    "normalize = softmax",
    "output o: f16[B, M, H, 16]",
)
ORDERS = {
    "rows": "loops = [q, kv]",
    "keys": "loops = [kv, q], softmax = online(rescale = every_step)",
    "decode": "loops = [kv], split.kv = 2",
    "gradients": "loops = [q, kv]",
}
_SIZES = {"B": 1, "M": 37, "N": 50, "H": 2}


def _text(mask: str, order: str, target: str) -> str:
    grads = ("grad q, k, v",) if order == "gradients" else ()
    schedule = f"{ORDERS[order]}\n  {small_tiles(target)}"
    return spec((*_LINES, f"mask = {mask}", *grads), schedule, target=target)


#: Every mask with queries outside, and each other kind of kernel with some of them.
RUNS = [
    *((mask, "rows") for mask in MASKS),
    *((mask, order) for n, mask in enumerate(MASKS) for order in [["keys", "decode", "gradients"][n % 3]]),
]


@pytest.mark.parametrize(("mask", "order"), RUNS)
def test_triton(mask: str, order: str) -> None:
    right(subject_of_text(_text(mask, order, "triton")), Case(dims=_SIZES, seed=5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "order"), [(MASKS[0], "rows"), (MASKS[1], "decode"), (MASKS[5], "gradients")]
)
def test_cuda(mask: str, order: str) -> None:
    skip_without_compiler("cuda.sm_80")
    right(subject_of_text(_text(mask, order, "cuda.sm_80")), Case(dims=_SIZES, seed=5))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [MASKS[0], MASKS[4], MASKS[7]])
def test_rows_of_64_bits_on_hopper(mask: str) -> None:
    """Whoever walks over the tiles of keys tests them by values of the queries' first and last row."""
    skip_without_compiler("cuda.sm_90a")
    lines = (line.replace("i32", "i64").replace("B, N] is", "B, X] is") for line in _LINES)
    schedule = "consumers = 2, tile.kv = 32\n  backward { accumulate.dq = two_pass }"
    text = spec((*lines, f"mask = {mask}", "grad q, k, v"), schedule, target="cuda.sm_90a")
    right(subject_of_text(text), Case(dims={"B": 2, "M": 150, "N": 90, "H": 1, "X": 160}, seed=5))


def _right_in_rows_of_their_own(mask: str, target: str) -> None:
    """The outputs, where each row of `doc` ascends at another pace."""
    lines = (*_LINES, "input at: i32[B]", f"mask = {mask}")
    (module,) = modules_of(spec(lines, small_tiles(target), target=target))
    assert any(isinstance(node, Search) for item in module.kernel.regions.bounds for node in _nodes(item))
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


@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("value", ["3", "h + 1", "b + 1", "q_idx // 8"])
def test_each_sequence_searches_its_own_row(value: str, target: str) -> None:
    skip_without_compiler(target)
    _right_in_rows_of_their_own(f"doc[b, kv_idx] >= {value}", target)


@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("row", ["b + 1", "b - 900", "at[b]", "(b + 1) % 3", "h"])
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
    lines = (*_LINES[:2], *_LINES[3:], *_LENGTHS, f"mask = {mask}", "grad q, k, v")
    made = subject_of_text(spec(lines, f"{tiles}\n  {schedule}", target=target))
    for sizes, seed in (((37, 50), 1), ((60, 40), 0)):
        right(made, Case(dims={"B": 2, "M": sizes[0], "N": sizes[1], "H": 1}, seed=seed))


@pytest.mark.parametrize(("mask", "order"), [(MASKS[0], "rows"), (MASKS[0], "keys"), (MASKS[4], "rows")])
def test_what_a_tile_test_reads_is_loaded_with_the_tile(mask: str, order: str) -> None:
    (module,) = modules_of(_text(mask, order, "cuda.sm_80"))
    kernel = module.kernel
    inner = {"q_lo", "q_hi"} if order == "keys" else {"kv_lo", "kv_hi"}
    assert any(_indices(test) & inner for test in kernel.regions.tests)
    assert not any(_indices(item) & inner for item in (*kernel.program, *kernel.regions.bounds))


def _nodes(item: Statement) -> Iterator[Expr]:
    return (node for expr in statement_expressions(item) for node in walk(expr))


def _indices(item: Statement) -> set[str]:
    return {node.name for node in _nodes(item) if isinstance(node, Index)}


@pytest.mark.parametrize("name", ["kv_lo", "kv_hi", "q_hi", "kv_idx"])
def test_a_name_before_it_exists_is_refused(name: str) -> None:
    """In the order of the kernel's text: bounds of the loop over keys come before any tile of them."""
    module = planned("kv_idx <= q_pos")
    kernel = module.kernel
    bad = Compare("<", Index(name), Index("b"))
    if name == "q_hi":  # known to the loops, but not to what a program does first
        program = Let(name="x", value=bad)
        broken = replace(kernel, program=(*kernel.program, program))
    else:
        broken = _with_loops(kernel, replace(kernel.regions.loops[0], start=Index(name)))
    with pytest.raises(ValueError, match=f"'{name}' has no value here"):
        verify_module(replace(module, kernel=broken))


def test_a_value_of_a_tile_is_not_known_outside_of_it() -> None:
    (module,) = modules_of(_text(MASKS[0], "rows", "triton"))
    kernel = module.kernel
    (loop,) = (loop for loop in kernel.regions.loops if loop.tests)
    hoisted = replace(
        kernel.regions,
        bounds=(*kernel.regions.bounds, *loop.tests),
        loops=tuple(replace(loop, tests=()) for loop in kernel.regions.loops),
    )
    with pytest.raises(ValueError, match="has no value here"):
        verify_module(replace(module, kernel=replace(kernel, regions=hoisted)))


def _with_loops(kernel: Forward | Decode, first: Loop) -> Forward | Decode:
    return replace(kernel, regions=replace(kernel.regions, loops=(first, *kernel.regions.loops[1:])))
