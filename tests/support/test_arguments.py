"""Numbers that are passed for scalars."""

from __future__ import annotations

import math

import pytest
import torch

from attnc.support.arguments import scalar_tensor

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("number", [1e39, -(10**400), 3.5e38])
def test_a_number_beyond_the_type_is_refused_by_name(number: float) -> None:
    like = torch.zeros(1)
    with pytest.raises(ValueError, match=r"^cap: expected a number that fits torch.float32, got -?[13]"):
        scalar_tensor("cap", number, torch.float32, like, "q")


@pytest.mark.parametrize("number", [math.inf, -math.inf, 3.4e38, True])
def test_a_number_of_the_type_is_taken(number: float) -> None:
    assert scalar_tensor("cap", number, torch.float32, torch.zeros(1), "q").item() == pytest.approx(
        float(number)
    )
