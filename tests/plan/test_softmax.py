"""How far scores can go, and how far they may."""

from __future__ import annotations

import math

import pytest
import torch

from attnc.expr.nodes import Binary, Call, Const, Dot, Neg
from attnc.model.dtypes import DType
from attnc.plan.softmax import safe_range, score_range


def test_score_range() -> None:
    capped = Binary("*", Const(50.0), Call("tanh", (Dot(),)))
    assert score_range(Dot()) == (-math.inf, math.inf)
    assert score_range(capped) == (-50.0, 50.0)
    assert score_range(Binary("-", Neg(capped), Const(2))) == (-52.0, 48.0)
    assert score_range(Binary("/", capped, Const(-2.0))) == (-25.0, 25.0)
    assert score_range(Call("max", (Const(1.0), capped))) == (1.0, 50.0)
    assert score_range(Binary("+", capped, Dot())) == (-math.inf, math.inf)
    assert score_range(Binary("*", Const(0.0), Dot())) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_safe_range(dtype: DType) -> None:
    low, high = safe_range(dtype)
    kind = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
    assert torch.tensor(math.exp(high), dtype=torch.float64).to(kind).isfinite()
    assert math.exp(low) / 2**8 >= torch.finfo(kind).tiny * 0.999
