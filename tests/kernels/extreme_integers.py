"""Masks of integers at the ends of their types, for kernels on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attnc.verify.case import Case
from attnc.verify.check import check_gradients
from attnc.verify.problem import build
from attnc.verify.subject import Subject
from attnc.verify.tolerance import expect
from attnc.verify.verdict import judge
from tests.targets import small_tiles
from tests.verify.judging import spec, subject_of_text

MOST, LEAST = 2**31 - 1, -(2**31)
DENSE = ("input q: f16[B, M, H, 16]", "input k, v: f16[B, N, H, 16]", "output o: f16[B, M, H, 16]")
PAGED = (
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
    "one of two": (
        ("x, y: i64[B]",), "kv_idx <= where(y[b] > 3, x[b], q_pos) and kv_idx - q_pos <= max(x[b], y[b])",
        {"x": (2**63 - 1, -(2**63)), "y": (2**63 - 1, 3)},
    ),
    "sorted, of 64 bits": (
        ("x: i64[B]", "t: i64[B, N] is sorted"), "t[b, kv_idx] < x[b] or t[b, kv_idx] > t[b, q_pos]",
        {"t": (2**63 - 1, -(2**63)), "x": (2**63 - 1, -(2**63), 0)},
    ),
    "quotients of 64 bits": (
        ("x: i64[B]", "t: i64[B, N] is sorted"),
        "kv_idx // 16 <= x[b] // 16 or t[b, kv_idx] // 1000 >= x[b] or t[b, kv_idx] // 9 == t[b, q_pos] // 9",
        {"t": (2**63 - 1, -(2**63), -5), "x": (2**63 - 1, -(2**63), 20)},
    ),
    "beside floats": (
        ("x: i32[B]",), "kv_idx < x[b] + inf and kv_idx <= 0.5 * x[b] + 2.5", {"x": (MOST, LEAST, 9)}
    ),
    "a length": (("n_len: i32[B]",), "causal", {"n_len": (LEAST, -1, MOST, 11)}),
}  # fmt: skip


def subject(
    name: str,
    schedule: str,
    target: str,
    *more: str,
    tensors: tuple[str, ...] = DENSE,
    tiles: str = "",
) -> Subject:
    """An attention with this mask, under this schedule; more: lines besides; tiles: those for a CPU
    if they are left out.
    """
    return subject_of_text(
        text(name, f"{schedule}\n  {tiles or small_tiles(target)}", target, *more, tensors=tensors)
    )


def text(name: str, schedule: str, target: str, *more: str, tensors: tuple[str, ...] = DENSE) -> str:
    """Its spec."""
    inputs, mask, _ = MASKS[name]
    length = ("length N = n_len[b]",) if name == "a length" else ()
    declared = (f"input {item}" for item in inputs)
    lines = (*tensors, *declared, *length, *_REST, f"mask = {mask}", *more)
    return spec(lines, schedule, target=target)


def right_at(made: Subject, values: Mapping[str, int], case: Case) -> None:
    """The outputs, and the gradients, where the inputs have these values everywhere."""
    attention = made.variant.attention
    problem = build(attention, case, device=made.device)
    inputs = dict(problem.inputs)
    for name, value in values.items():
        given = inputs[name]
        inputs[name] = torch.full_like(given, value) if isinstance(given, torch.Tensor) else value
    problem = replace(problem, inputs=inputs)
    made.run(inputs, problem.outputs)
    verdict = judge(attention, expect(attention, inputs, made.bound), problem.outputs)
    assert verdict.ok, (values, verdict.message)
    if made.gradients is not None:
        verdict = check_gradients(made, made.gradients, problem, case)
        assert verdict.ok, (values, verdict.message)


def choices(name: str) -> list[dict[str, int]]:
    """The values that its inputs take, each with all others."""
    found: list[dict[str, int]] = [{}]
    for key, values in MASKS[name][2].items():
        found = [{**chosen, key: value} for chosen in found for value in values]
    return found
