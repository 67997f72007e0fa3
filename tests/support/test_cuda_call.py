"""Sizes that launches of CUDA kernels are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnc.runtime.loader import load_text
from attnc.support.cuda_call import dq_floats
from tests.support.configs import CONFIGS

GENERATED = Path(__file__).parents[2] / "generated"


def test_sums_of_dq_have_whole_fragments() -> None:
    assert dq_floats(CONFIGS[0], 8) == 128 * 128
    assert dq_floats(CONFIGS[0]._replace(BLOCK_M=64, WARPS=8), 4) == 64 * 64


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_are_aligned_where_every_stride_is(axis: int) -> None:
    """Of sequences, rows and heads alike: 16 bytes are copied at a time."""
    text = (GENERATED / "causal_gqa" / "cuda_sm_80" / "bf16_d64.py").read_text(encoding="utf-8")
    call = vars(load_text(text))["CALL"]
    call.forget()
    shape, strides = (2, 3, 4, 64), [1024, 320, 80, 1]
    found = []
    for beyond in (0, 8, 4):
        changed = [stride + beyond * (at == axis) for at, stride in enumerate(strides)]
        x = torch.empty_strided(shape, changed, dtype=torch.bfloat16)
        *_, launches = call._prepare((x, x, x), None, None, call.no_extras)
        found.append(launches[0].arguments.rows_aligned)
    assert found == [True, True, False]
