"""The facts of element types, held to PyTorch's own."""

import pytest
import torch

from attnc.model.dtypes import DType
from attnc.support.arguments import DTYPES


@pytest.mark.parametrize("dtype", DType)
def test_a_type_has_the_size_and_name_of_pytorchs(dtype: DType) -> None:
    theirs = getattr(torch, dtype.facts.torch)
    assert dtype.bytes == theirs.itemsize
    assert DTYPES[dtype.value] is theirs


def test_generated_code_knows_every_type() -> None:
    assert set(DTYPES) == {dtype.value for dtype in DType}


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.facts.precision])
def test_floats_have_the_limits_of_pytorchs(dtype: DType) -> None:
    theirs = torch.finfo(getattr(torch, dtype.facts.torch))
    assert dtype.largest == theirs.max
    assert dtype.smallest_normal == theirs.tiny
    assert dtype.unit_roundoff == theirs.eps / 2
    one = torch.tensor(dtype.smallest_subnormal, dtype=torch.float64)
    assert one.to(getattr(torch, dtype.facts.torch)).double() == one
    made = torch.tensor([torch.inf, torch.nan]).to(getattr(torch, dtype.facts.torch)).float()
    assert bool(made[0].isinf()) == dtype.facts.has_infinity
    assert bool(made[1].isnan()) == dtype.facts.has_nan


def test_integers_have_no_roundoff() -> None:
    with pytest.raises(ValueError, match="i32 is no float"):
        _ = DType.I32.unit_roundoff
