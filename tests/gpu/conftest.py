"""Tests of compiled kernels: `pytest tests/gpu`, in a process of their own on a machine with a GPU."""

import pytest
import torch

from attnc.verify.interpreter import is_interpreting


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The GPU; without one, or where Triton interprets in this process, the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if is_interpreting():
        pytest.skip("Triton interprets in this process: run 'pytest tests/gpu' alone")
    return torch.device("cuda")
