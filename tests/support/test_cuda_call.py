"""Sizes that launches of CUDA kernels are made of."""

from __future__ import annotations

from attnc.support.cuda_call import dq_floats
from tests.support.configs import CONFIGS


def test_sums_of_dq_have_whole_fragments() -> None:
    assert dq_floats(CONFIGS[0], 8) == 128 * 128
    assert dq_floats(CONFIGS[0]._replace(BLOCK_M=64, WARPS=8), 4) == 64 * 64
