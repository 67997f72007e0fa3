"""What is said where a target has no backward."""

from __future__ import annotations

import pytest

from attnc.model.schedule import Schedule
from attnc.plan.differentiable import check_differentiable
from attnc.plan.targets import schedule_for
from attnc.plan.triton import Triton
from tests.model.resolving import resolve_text
from tests.plan.planning import planned
from tests.refusals import refusal
from tests.verify.judging import modules_of, spec


def test_a_target_without_backward_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Triton, "has_backward", False)
    module = planned(grads="q, k, v")
    schedule = Schedule(name="under_test", target="triton", knobs={}, where={})
    assert module.backward is None
    (warning,) = check_differentiable(module.variant, schedule)
    assert (warning.code, warning.primary.text) == ("W0802", "triton has no backward kernels yet")


def narrow(knobs: str, *, grad: str = "q", target: str = "cuda.sm_90a", more: tuple[str, ...] = ()) -> str:
    lines = [
        "input q: bf16[B, M, H, 64]",
        "input k: e4m3[B, N, H, 64]",
        "input v: bf16[B, N, H, 64]",
        "input bias: f32[B, N]",
        *more,
        "score = dot(q, k) + bias[b, kv_idx]",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
        f"grad {grad}",
    ]
    return spec(lines, knobs, target=target)


@pytest.mark.parametrize("target", ["cuda.sm_90a", "triton"])
def test_queries_have_gradients_beside_keys_of_8_bits(target: str) -> None:
    (module,) = modules_of(narrow("loops = [q, kv]", target=target))
    assert module.backward is not None
    assert [planned.kind for planned in module.backward.kernels] == ["dq"]


@pytest.mark.parametrize("knobs", ["convert = tiles", "loops = [kv], pack = gqa"])
def test_they_have_none_where_tiles_are_converted(knobs: str) -> None:
    text = narrow(knobs)
    (module,) = modules_of(text)
    assert module.backward is None
    (schedule,) = resolve_text(text).schedules
    (warning,) = check_differentiable(module.variant, schedule)
    decodes = schedule.is_decode  # such a kernel refuses 'convert'
    assert ("write 'convert = before'" in warning.hints[0]) != decodes
    assert ("loops = [q, kv]" in warning.hints[0]) == decodes


def test_all_calls_of_a_cache_of_8_bits_have_them() -> None:
    length = ("input lens: i32[B]", "length N = lens[b]")
    text = narrow("", more=length)
    (module,) = modules_of(text)
    assert module.conversion is not None
    assert module.backward is not None
    program = resolve_text(text[: text.index("schedule")])
    made = modules_of(text[: text.index("schedule")] + schedule_for(program, "spec", "cuda.sm_90a"))
    assert all(module.backward is not None for module in made)


@pytest.mark.parametrize(
    ("target", "grad", "knobs"),
    [
        ("triton", "q, bias", ""),
        ("cuda.sm_90a", "q, bias", ""),
        ("triton", "q, v", ""),
        ("triton", "q", "backward { accumulate.dq = atomic }"),
    ],
)
def test_sums_over_queries_are_refused_there(target: str, grad: str, knobs: str) -> None:
    said = refusal(modules_of, narrow(f"loops = [q, kv]\n  {knobs}", grad=grad, target=target))
    assert "gradients of what keys have beside k of e4m3" in said
