"""Programs that set a default device or type of torch's: nothing here takes it for its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from attnc.adapters import flashinfer
from attnc.adapters.vllm import unified_attention_diffkv
from attnc.api import repeats
from attnc.api.fastest import FEW
from attnc.compat import flash_attn
from attnc.flex import flex_attention
from attnc.paging import PagedCache
from tests.api.test_few_queries import DOORS
from tests.processes import run_program

#: Imports all there is, and makes no tensor without data of it.
_IMPORTS = """
import importlib, pkgutil, sys
import torch
torch.set_default_device("meta")
import attnc
for module in pkgutil.walk_packages(attnc.__path__, "attnc."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "attnc":
            raise
"""


class _Found(TorchFunctionMode):
    """Notes the lines of attnc that make a tensor on whatever device, or of whatever type, is the default."""

    def __init__(self) -> None:
        self.lines: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        is_typed = (
            kwargs.get("dtype") is not None or not torch.is_tensor(found) or not found.is_floating_point()
        )
        if func in _device_constructors() and not (is_typed and kwargs.get("device") is not None):
            frame = sys._getframe(1)
            module = str(frame.f_globals.get("__name__"))
            if module.partition(".")[0] == "attnc":
                self.lines.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return found


@contextmanager
def noted() -> Iterator[set[str]]:
    with _Found() as found:
        yield found.lines


def by_custom_mask(rows: int) -> Any:
    q, k = torch.randn(rows, 4, 16), torch.randn(9, 2, 16)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(8))
    mask = torch.ones(rows * 9, dtype=torch.bool)
    ends = torch.tensor([0, rows]), torch.tensor([0, 9])
    wrapper.plan(*ends, 4, 2, 16, custom_mask=mask, q_data_type="float32")
    return wrapper.run(q, k, k)


def by_gradients(rows: int) -> Any:
    q, k = torch.randn(1, rows, 2, 16, requires_grad=True), torch.randn(1, 9, 2, 16, requires_grad=True)
    o = flash_attn.flash_attn_func(q, k, k, dropout_p=0.1, causal=True, softcap=2.0)
    bias = torch.randn(9, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    keys = k.transpose(1, 2)
    o = o + flex_attention(q.transpose(1, 2), keys, keys, mod).transpose(1, 2)
    o.sum().backward()
    assert bias.grad is not None


def by_cache_of_8_bits(rows: int) -> Any:
    q, k = torch.randn(rows, 4, 16).bfloat16(), torch.randn(9, 2, 16).to(torch.float8_e4m3fn)
    flashinfer.single_prefill_with_kv_cache(q, k, k, k_scale=0.5)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(8))
    types: Any = {"q_data_type": "bfloat16", "kv_data_type": "float8_e4m3fn"}
    wrapper.plan(torch.tensor([0, rows]), torch.tensor([0, 9]), 4, 2, 16, **types)
    return wrapper.run(q, k, k, v_scale=0.25)


def by_unified_attention(rows: int) -> Any:
    q, cache = torch.randn(rows, 4, 16), torch.randn(3, 16, 2, 24)
    out, table = torch.empty(rows, 4, 8), torch.arange(3, dtype=torch.int32)[None]
    ends, lengths = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    given = (q, cache[..., :16], cache[..., 16:], out, ends, lengths, 0.25, True, (-1, -1), table, 0.0)
    unified_attention_diffkv(*given, max_seqlen_q=rows)


def by_paged_cache(rows: int) -> Any:
    cache = PagedCache(
        pages=4,
        page=16,
        kv_heads=2,
        head_dim=16,
        sequences=2,
        max_length=32,
        dtype=torch.float32,
        device="cpu",
    )
    new = cache.append([cache.allocate()], rows)
    cache.write(new.slots, *torch.randn(2, rows, 2, 16))


ALL = [*DOORS, by_gradients, by_custom_mask, by_cache_of_8_bits, by_unified_attention, by_paged_cache]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("door", ALL, ids=lambda door: door.__name__)
def test_doors_name_the_device_and_type_of_what_they_make(door: Callable[[int], Any]) -> None:
    repeats.forget()
    with noted() as lines:
        for rows in (1, 1, FEW + 1):
            door(rows)
    assert not lines


@pytest.mark.slow
def test_imports_read_no_tensor_of_the_default_device() -> None:
    run_program(_IMPORTS, check=True)
