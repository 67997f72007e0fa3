"""Which element types a cache of vLLM's may have, and whether sums of its rows have an order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from attnc.adapters.specs import SEGMENT, readable

#: vLLM's names of caches that have the type of the model.
UNQUANTISED = ("auto", "float16", "bfloat16")


def order_of_sums() -> int:
    """Returns the keys of a segment where vLLM is asked for rows that do not depend on the batch, else 0."""
    return SEGMENT if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") else 0


def find_misfit(
    kv_cache_dtype: Any, dtype: torch.dtype, quantised: Mapping[str, torch.dtype], capability: Any
) -> str | None:
    """Returns why a cache cannot be read, or None. It has the type of the model, or 8 bits beside one of 16.

    quantised: the types of 8 bits that a backend reads, by vLLM's names; capability: of the device, None
    where vLLM does not say.
    """
    if kv_cache_dtype in quantised and dtype in (torch.float16, torch.bfloat16):
        if capability is None:
            return None
        here = (int(capability.major), int(capability.minor))
        return readable(quantised[kv_cache_dtype], here) or None
    if kv_cache_dtype in (None, "auto") or kv_cache_dtype == str(dtype).removeprefix("torch."):
        return None
    return f"kv_cache_dtype {kv_cache_dtype} with a model of {dtype}"
