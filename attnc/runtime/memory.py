"""What ran out of memory, and whether others have it."""

from __future__ import annotations

import gc
import re


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of Python, PyTorch, CuPy or a driver says that memory was not to be had."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())


def describe_lack(error: BaseException) -> str:
    """Returns what was asked for and what there was, in a line, without the list of other processes."""
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
    free, total = torch.cuda.mem_get_info(device)
    return free < total // 2
