"""Rows behind the last packed sequence are nobody's: kernels for Hopper clear their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import attnc
from tests.plans import SPECS
from tests.targets import needs_gxx

pytestmark = [pytest.mark.slow, needs_gxx]

QUERY_ENDS, KEY_ENDS = [0, 70, 150], [0, 130, 260]


@pytest.fixture(scope="module")
def function() -> Any:
    made: Any = attnc.compile(
        (SPECS / "packed_training.attn").read_text(encoding="utf-8"), target="cuda.sm_90a"
    )
    return made


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_of_rows_behind_are_zero(
    function: Any, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks share a walk, whose parts have no sums of these rows."""
    call = function.module.default.CALL
    allocate = call.allocate

    def fill(layouts: Sequence[Any], like: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = allocate(layouts, like)
        return [x.view(torch.uint8).fill_(255).view(x.dtype) for x in made]  # NaN

    monkeypatch.setattr(call, "allocate", fill)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(rows, h, 128).bfloat16().requires_grad_() for rows, h in ((200, 4), (300, 2), (300, 2))
    )
    ends = [torch.tensor(cu, dtype=torch.int32) for cu in (QUERY_ENDS, KEY_ENDS)]
    config = call.backward.configs["dkdv"][0]._replace(parts=parts)
    o, _ = function(q, k, v, *ends, backward_config={"dkdv": config})
    gradients = torch.autograd.grad(o[: QUERY_ENDS[-1]].float().sum(), (q, k, v))
    for x, end in zip(gradients, (QUERY_ENDS[-1], KEY_ENDS[-1], KEY_ENDS[-1]), strict=True):
        assert x[:end].isfinite().all()
        assert x[:end].any()
        assert torch.equal(x[end:], torch.zeros_like(x[end:]))
