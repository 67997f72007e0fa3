"""What is said where a target has no backward."""

from __future__ import annotations

import pytest

from attnc.model.schedule import Schedule
from attnc.plan.differentiable import check_differentiable
from attnc.plan.triton import Triton
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


def test_they_have_none_where_tiles_are_converted() -> None:
    (module,) = modules_of(narrow("convert = tiles"))
    assert module.backward is None


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
