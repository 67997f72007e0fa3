"""What ran out of memory or room, and whether others have it; and whether a GPU takes any more work."""

from __future__ import annotations

import gc
import re
from typing import Any


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of Python, PyTorch, CuPy or a driver says that memory was not to be had."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())


def is_of_machine(error: BaseException) -> bool:
    """Returns whether an error says that the machine failed, whatever the kernel: of files, such as a full
    disk, or of memory.
    """
    return isinstance(error, OSError) or ran_out_of_memory(error)


def describe_lack(error: BaseException) -> str:
    """Returns the memory that was asked for and that there was, in a line, without the list of other
    processes.
    """
    text = re.split(r" Process \d+ has| Including non-PyTorch|\n", str(error))[0].strip().rstrip(".")
    is_clear = "out of memory" in text.lower()
    return text if is_clear else f"out of memory: {text}" if text else "out of memory"


def is_crowded(device: str) -> bool:
    """Returns whether most of a GPU's memory is in use, once this process has given back what it can. Of a
    CPU, which pages, nobody knows: False.
    """
    if device == "cpu":
        return False
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # other processes leave too little even to ask
        if not ran_out_of_memory(error):
            raise
        return True
    return free < total // 2


class GpuLost(Exception):
    """A kernel has ended the process's work on a GPU, by an access outside of all memory as a rule.

    what: who did it, and what CUDA said; case, repro: its case, and the command that runs it again.
    """

    def __init__(self, what: str, repro: str, case: Any) -> None:
        super().__init__(what)
        self.what, self.repro, self.case = what, repro, case


def is_lost(device: str) -> bool:
    """Returns whether a GPU takes no more work from this process, as after an access outside of all memory:
    every call of CUDA fails then, with the error of the first.
    """
    if device == "cpu":
        return False
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not ran_out_of_memory(error)
    return False


def describe_loss(said: object) -> str:
    """Returns an error of CUDA's, or its message, in a line without the advice."""
    return re.split(r"\n| Search for| CUDA kernel errors", str(said))[0].strip().rstrip(".")
