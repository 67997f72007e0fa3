"""Keys and values of 8 bits on a GPU: every code becomes its number, and results are within the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnc.model.dtypes import DType
from attnc.verify.subject import Subject
from tests.kernels.test_narrow import KINDS, NARROW, case, numbers, same_numbers, subject, types_of
from tests.verify.judging import assert_within_bound


def skip_what_is_not_read(*dtypes: str) -> None:
    """e4m3 is compiled from compute capability 8.9 on."""
    if "e4m3" in dtypes and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton does not compile e4m3 for this GPU")


@pytest.mark.parametrize("element", [DType.F16, DType.BF16])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_becomes_its_number(dtype: DType, element: DType) -> None:
    skip_what_is_not_read(dtype)
    got, expected = numbers(dtype, element, "cuda")
    assert same_numbers(got, expected)


def large(made: Subject) -> dict[str, int]:
    few = made.plan is not None and made.plan.kernel.structure == "decode"
    return {"B": 3, "M": 4 if few else 300, "N": 777, "Hkv": 2, "G": 4}


@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "i8"), ("i8", "bf16")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_within_the_bound(kind: str, pair: tuple[str, str]) -> None:
    types = types_of(kind, pair)
    skip_what_is_not_read(*types)
    made = subject(kind, *types)
    for number in range(len(made.configs)):
        assert_within_bound(made, replace(case(made, seed=number, config=number), dims=large(made)))
