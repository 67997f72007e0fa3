"""Keys and values of 8 bits on a GPU: every code becomes its number, and results are within the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnc.model.tensors import DType
from attnc.runtime.loader import load_text
from attnc.support.arguments import DTYPES
from attnc.target.triton.printer import converted
from attnc.verify.subject import Subject
from tests.verify.judging import right
from tests.verify.test_narrow import KINDS, NARROW, case, subject, types_of

KERNEL = """import triton
import triton.language as tl


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at){convert})
"""


def skip_what_is_not_read(*dtypes: str) -> None:
    """e4m3 is compiled from compute capability 8.9 on."""
    if "e4m3" in dtypes and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton does not compile e4m3 for this GPU")


def numbers(convert: str, dtype: DType, element: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel makes of all codes, and what PyTorch does."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(DTYPES[dtype]).cuda()
    y = torch.empty(256, dtype=DTYPES[element], device="cuda")
    load_text(KERNEL.format(convert=convert)).convert[(1,)](codes, y, BLOCK=256)
    return y.cpu(), codes.cpu().double().to(DTYPES[element])


@pytest.mark.parametrize("element", [DType.F16, DType.BF16])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_becomes_its_number(dtype: DType, element: DType) -> None:
    skip_what_is_not_read(dtype)
    got, expected = numbers(converted(dtype, element), dtype, element)
    at = ~expected.isnan()
    assert torch.equal(got[at].view(torch.int16), expected[at].view(torch.int16))
    assert got[~at].isnan().all()


def test_e5m2_becomes_bf16_as_the_interpreter_says() -> None:
    got, expected = numbers(".to(tl.bfloat16)", DType.E5M2, DType.BF16)
    finite = expected.isfinite()
    assert torch.equal(got[finite], expected[finite])
    assert got.isfinite().all()
    assert (got[~finite].abs() >= 65536).all()


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
        right(made, replace(case(made, seed=number, config=number), dims=large(made)))
