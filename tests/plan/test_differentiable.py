"""What is said where a target has no backward."""

from __future__ import annotations

import pytest

from attnc.model.schedule import Schedule
from attnc.plan.differentiable import check_differentiable
from attnc.plan.triton import Triton
from tests.plan.planning import planned


def test_a_target_without_backward_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Triton, "has_backward", False)
    module = planned(grads="q, k, v")
    schedule = Schedule(name="under_test", target="triton", knobs={}, where={})
    assert module.backward is None
    (warning,) = check_differentiable(module.variant, schedule)
    assert (warning.code, warning.primary.text) == ("W0802", "triton has no backward kernels yet")
