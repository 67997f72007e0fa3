"""Scalars of calls, which kernels read from memory."""

from __future__ import annotations

import ctypes
import gc
from weakref import ref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnc.compat import call


def test_a_number_that_was_forgotten_keeps_its_memory() -> None:
    """A graph that was captured before reads it there."""
    cpu = torch.device("cpu")
    number = call.number(0.40625, torch.float32, cpu)
    address, gone = number.data_ptr(), ref(number)
    del number
    others = [call.number(n, torch.int32, cpu).data_ptr() for n in range(100_000, 102_100)]
    gc.collect()
    assert gone() is None, "it is still remembered, and the test shows nothing"
    assert ctypes.c_float.from_address(address).value == 0.40625
    assert len({address, *others}) == 2101
    assert call.number(0.40625, torch.float32, cpu).data_ptr() != address


def test_a_call_with_fake_tensors_leaves_no_fake_numbers() -> None:
    with FakeTensorMode():
        fake = call.number(0.375, torch.float32, torch.device("cpu"))
    found = call.number(0.375, torch.float32, torch.device("cpu"))
    assert type(fake) is not type(found) is torch.Tensor
