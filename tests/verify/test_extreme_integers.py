"""Integers at the ends of their types: an i32 input has the whole range of i32, an i64 input that of i64.

`right = 2^31 - 1` is what callers pass for "no window". Sums with it leave 32 bits, and bounds of loops that
follow from them must not wrap around: over pages they would ask for entries before the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from attnc.plan.ir import Fetch
from attnc.plan.width import is_wide
from attnc.verify.case import Case
from attnc.verify.gradient_check import check_gradients
from attnc.verify.problem import build
from attnc.verify.subject import Subject
from attnc.verify.tolerance import expect
from attnc.verify.verdict import judge
from tests.verify.judging import TARGETS, modules_of, skip_without_compiler, spec, subject_of_text

MOST, LEAST = 2**31 - 1, -(2**31)
_DENSE = ("input q: f16[B, M, H, 16]", "input k, v: f16[B, N, H, 16]", "output o: f16[B, M, H, 16]")
_PAGED = (
    "input q: f16[B, M, H, 16]",
    "input k, v: f16[B, N, H, 16] via paged(table, page = 16)",
    "input table: i32[B, P]",
    "input kv_len: i32[B]",
    "length N = kv_len[b]",
    "output o: f16[B, M, H, 16]",
)
_REST = ("score = dot(q, k) / 4", "normalize = softmax")
KV_Q = "loops = [kv, q], softmax = online(rescale = every_step)"
DECODE = "loops = [kv], split.kv = 3"

#: Inputs and the mask, and the values that the inputs take, each with all others.
MASKS: Mapping[str, tuple[tuple[str, ...], str, Mapping[str, tuple[int, ...]]]] = {
    "right": (("right: i32[]",), "kv_idx <= q_pos + right", {"right": (MOST, LEAST, MOST - 40)}),
    "window": (
        ("left, right: i32[]",), "window(left, right)", {"left": (MOST, LEAST, 5), "right": (MOST, 0)}
    ),
    "of 64 bits": (
        ("left, right: i64[]",), "window(left, right)",
        {"left": (2**62, -(2**62), 2**32 + 5), "right": (2**62, 0)},
    ),
    "of a head": (("reach: i32[H]",), "q_pos - kv_idx <= reach[h]", {"reach": (MOST, LEAST)}),
    "of a row": (("far: i32[B, M]",), "kv_idx <= q_pos + far[b, q_idx]", {"far": (MOST, LEAST)}),
    "of a key": (("far: i32[N]",), "q_idx >= kv_idx - far[kv_idx]", {"far": (MOST, LEAST)}),
    "one more": (("stop: i32[B]",), "kv_idx <= stop[b] and kv_idx + 1 > stop[b] - 30", {"stop": (MOST, 20)}),
    "two of them": (
        ("x, y: i32[B]",), "kv_idx + x[b] <= q_pos + y[b]", {"x": (MOST, LEAST), "y": (MOST, LEAST, 0)}
    ),
    "multiples": (
        ("x: i32[B]",), "kv_idx * 100 <= 3 * x[b] + q_pos * 100", {"x": (MOST, LEAST, 70_000_000, 0)}
    ),
    "parts": (
        ("x: i32[B]",), "(kv_idx + x[b]) // 8 == (q_pos + x[b]) // 8 or abs(x[b] - kv_idx) < 3",
        {"x": (MOST, LEAST, 3)},
    ),
    "the least of them": (
        ("x: i32[B]",),
        "-x[b] > kv_idx or abs(x[b]) - 1 == 2147483647 or x[b] // -1 > kv_idx",
        {"x": (MOST, LEAST)},
    ),
    "subscripts": (
        ("x: i32[B]", "flag: bool[N]"), "flag[kv_idx + x[b]] or kv_idx < 7", {"x": (MOST, LEAST, -3)}
    ),
    "sorted": (
        ("x: i32[B]", "doc: i32[B, N] is sorted"), "doc[b, kv_idx] + 1 <= x[b] - q_pos",
        {"x": (MOST, LEAST, 25)}
    ),
    "a length": (("n_len: i32[B]",), "causal", {"n_len": (LEAST, -1, MOST, 11)}),
}  # fmt: skip


def subject(name: str, schedule: str, target: str, *more: str, tensors: tuple[str, ...] = _DENSE) -> Subject:
    inputs, mask, _ = MASKS[name]
    tiles = "tile.q = 16, tile.kv = 16" if target == "triton" else "tile.q = 32, tile.kv = 32, warps = 2"
    length = ("length N = n_len[b]",) if name == "a length" else ()
    declared = (f"input {item}" for item in inputs)
    lines = (*tensors, *declared, *length, *_REST, f"mask = {mask}", *more)
    return subject_of_text(spec(lines, f"{schedule}\n  {tiles}", target=target))


def right_at(made: Subject, values: Mapping[str, int], case: Case) -> None:
    """The outputs, and the gradients, where the inputs have these values everywhere."""
    attention = made.variant.attention
    problem = build(attention, case)
    inputs = dict(problem.inputs)
    for name, value in values.items():
        given = inputs[name]
        inputs[name] = torch.full_like(given, value) if isinstance(given, torch.Tensor) else value
    problem = replace(problem, inputs=inputs)
    made.run(inputs, problem.outputs)
    verdict = judge(attention, expect(attention, inputs, made.bound), problem.outputs)
    assert verdict.ok, (values, verdict.message)
    if made.gradients is not None:
        verdict = check_gradients(attention, made.module, made.gradients, problem, case)
        assert verdict.ok, (values, verdict.message)


def choices(name: str) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for key, values in MASKS[name][2].items():
        found = [{**chosen, key: value} for chosen in found for value in values]
    return found


CASE = Case(dims={"B": 1, "M": 21, "N": 37, "H": 1}, seed=4)


@pytest.mark.parametrize("name", MASKS)
def test_rows(name: str) -> None:
    made = subject(name, "loops = [q, kv]", "triton")
    for values in choices(name):
        right_at(made, values, CASE)


def test_comparisons_saturate_beyond_64_bits() -> None:
    """What leaves 64 bits is not defined; one far integer beside positions counts as far all the same."""
    made = subject("of 64 bits", "loops = [q, kv]", "triton")
    problem = build(made.variant.attention, CASE)
    found = []
    for far in (2**63 - 1, 2**62):
        o = torch.empty_like(problem.outputs["o"])
        made.run({**problem.inputs, "left": far, "right": far}, {"o": o})
        found.append(o)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["right", "window", "of a key"])
def test_keys_outside(name: str) -> None:
    made = subject(name, KV_Q, "triton")
    for values in choices(name):
        right_at(made, values, CASE)


@pytest.mark.parametrize("name", ["window", "of a row", "of 64 bits"])
def test_gradients(name: str) -> None:
    made = subject(name, "loops = [q, kv]", "triton", "grad q, k, v")
    for values in choices(name)[:3]:
        right_at(made, values, CASE)


@pytest.mark.parametrize("name", ["right", "window"])
def test_pages_shared_out(name: str) -> None:
    made = subject(name, DECODE, "triton", tensors=_PAGED)
    case = Case(dims={"B": 2, "M": 2, "N": 70, "H": 1}, seed=3)
    for values in choices(name):
        right_at(made, values, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("right", "pages"),
        ("window", "gradients"),
        ("of 64 bits", "rows"),
        ("two of them", "rows"),
        ("window", KV_Q),
    ],
)
def test_cuda(name: str, kind: str) -> None:
    skip_without_compiler("cuda.sm_80")
    case = CASE
    match kind:
        case "pages":
            made = subject(name, DECODE, "cuda.sm_80", tensors=_PAGED)
            case = Case(dims={"B": 2, "M": 2, "N": 70, "H": 1}, seed=3)
        case "gradients":
            made = subject(name, "loops = [q, kv]", "cuda.sm_80", "grad q, k, v")
        case "rows":
            made = subject(name, "loops = [q, kv]", "cuda.sm_80")
        case schedule:
            made = subject(name, schedule, "cuda.sm_80")
    for values in choices(name):
        right_at(made, values, case)


@pytest.mark.slow
def test_queries_far_before_the_keys_on_cuda() -> None:
    """Shares of no key are empty, not of fewer: the first row of one would stand before the table."""
    skip_without_compiler("cuda.sm_80")
    made = subject("right", DECODE, "cuda.sm_80", tensors=_PAGED)
    right_at(made, {"right": 0}, Case(dims={"B": 1, "M": 500, "N": 3, "H": 1}, seed=3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["right", "window", "of 64 bits", "of a head", "of a row", "of a key"])
def test_masks_stay_in_32_bits(name: str, target: str) -> None:
    """One far integer is brought near where it is loaded; no element and no bound is computed in 64 bits."""
    inputs, mask, _ = MASKS[name]
    lines = (*_DENSE, *(f"input {item}" for item in inputs), *_REST, f"mask = {mask}")
    (module,) = modules_of(spec(lines, "loops = [q, kv]", target=target))
    (kernel,) = module.kernels
    assert kernel.step.keep is not None
    assert not is_wide_anywhere(kernel.step.keep)
    for item in kernel.regions.bounds:
        if not isinstance(item, Fetch):
            assert not is_wide_anywhere(item.value)


def is_wide_anywhere(expr: object) -> bool:
    from attnc.expr.nodes import walk

    return any(map(is_wide, walk(expr)))  # type: ignore[arg-type]
