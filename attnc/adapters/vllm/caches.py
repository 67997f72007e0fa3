"""What vLLM's backends have in common: the caches that they read, where, and whether sums have an order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch

from attnc.adapters.specs import SEGMENT, readable

#: vLLM's names of caches that have the type of the model.
UNQUANTISED = ("auto", "float16", "bfloat16")


class OrderedSums:
    """The attention of a layer, whose sums may have an order."""

    @cached_property
    def _order(self) -> int:
        """Keys of a segment where vLLM is asked for rows that do not depend on the batch, else 0."""
        return SEGMENT if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") else 0


class Described:
    """What vLLM asks of a backend, in front of vLLM's class among its bases.

    _widest: columns of a head, at most; _quantised: types of elements of 8 bits by vLLM's names of caches
    """

    _widest: ClassVar[int] = 576
    _quantised: ClassVar[Mapping[str, torch.dtype]] = {}

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 16 <= head_size <= cls._widest

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        return cls._find_misfit(head_size, dtype, kv_cache_dtype, device_capability)

    @classmethod
    def _find_misfit(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, capability: Any
    ) -> str | None:
        return find_misfit(kv_cache_dtype, dtype, cls._quantised, capability)


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
