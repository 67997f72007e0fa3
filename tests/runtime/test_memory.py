"""What ran out of memory, and what is said of it."""

import numpy as np
import pytest
import torch

from attnc.runtime.memory import describe_lack, is_crowded, ran_out_of_memory

_TORCH = (
    "CUDA out of memory. Tried to allocate 4.02 GiB. GPU 0 has a total capacity of 139.80 GiB of which 661.88"
    " MiB is free. Process 9181 has 692.00 MiB memory in use. Process 14077 has 12.64 GiB memory in use."
    " Including non-PyTorch memory, this process has 612.00 MiB memory in use."
)


def test_a_lack_is_said_without_what_each_process_has() -> None:
    said = describe_lack(torch.OutOfMemoryError(_TORCH))
    assert said.startswith("CUDA out of memory. Tried to allocate 4.02 GiB. GPU 0 has")
    assert said.endswith("661.88 MiB is free")
    assert describe_lack(MemoryError()) == "out of memory"
    assert describe_lack(MemoryError("8 bytes")) == "out of memory: 8 bytes"


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (torch.OutOfMemoryError(_TORCH), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("out of resource: shared memory, Required: 1, Hardware limit: 0"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_every_library_are_known(error: Exception, is_lack: bool) -> None:
    assert ran_out_of_memory(error) == is_lack


def test_an_array_that_fits_nowhere_is_a_lack() -> None:
    with pytest.raises(MemoryError) as lack:
        np.empty(1 << 60, dtype=np.uint8)
    assert ran_out_of_memory(lack.value)
    assert describe_lack(lack.value).startswith("out of memory: Unable to allocate 1.00 EiB")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("error", "is_raised"), [("CUDA error: out of memory", False), ("device lost", True)]
)
def test_a_gpu_that_cannot_even_be_asked_is_crowded(
    monkeypatch: pytest.MonkeyPatch, error: str, is_raised: bool
) -> None:
    def ask(device: str) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    if is_raised:
        with pytest.raises(RuntimeError, match=error):
            is_crowded("cuda")
    else:
        assert is_crowded("cuda")
