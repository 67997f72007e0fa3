"""Who decodes: the generated kernels, compiled from attnc/bench/specs/decode, and what PyTorch brings along.

The peers get the cache as serving systems lay it out, [B, N, Hkv, D], transposed without a copy. None of them
reads pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.decode import DecodeInputs
from attnc.build import front, plan_program
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch

SPEC = Path(__file__).parent / "specs" / "decode" / "decode.attn"
Make: TypeAlias = Callable[[DecodeInputs], Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """`ours`: a variant of the generated kernel rather than a peer; `compiles`: its first launch takes
    seconds, so that it is worth warming up in parallel.
    """

    name: str
    title: str
    make: Make
    ours: bool = False
    compiles: bool = True


@cache
def modules() -> Mapping[str, ModuleType]:
    planned = plan_program(front(SPEC)).modules
    return {module.variant.attention.name: load_module(module) for module in planned}


def _dense(name: str) -> Make:
    def make(x: DecodeInputs) -> Launch:
        kernel = getattr(modules()[name], name)
        return lambda: kernel(x.q, x.k, x.v, x.kv_len)

    return make


def _paged(x: DecodeInputs) -> Launch:
    kernel: Any = modules()["paged"].paged
    return lambda: kernel(x.q, x.k_pages, x.v_pages, x.block_table, x.kv_len)


def _sdpa(backend: SDPBackend) -> Make:
    def make(x: DecodeInputs) -> Launch:
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return launch

    return make


def _flex(x: DecodeInputs) -> Launch:
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    compiled = _compiled_flex(k.shape)
    return lambda: compiled(q, k, v, enable_gqa=True)


@cache
def _compiled_flex(_shape: torch.Size) -> Any:
    """Compiled anew for each shape: PyTorch keeps eight at most, and gives up after that."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


DECODERS: tuple[Decoder, ...] = (
    Decoder(name="attnc", title="attnc", make=_dense("dense"), ours=True),
    Decoder(name="paged", title="page 16", make=_paged, ours=True),
    Decoder(name="unified", title="unified_max", make=_dense("unified"), ours=True),
    Decoder(name="cudnn", title="cuDNN", make=_sdpa(SDPBackend.CUDNN_ATTENTION), compiles=False),
    Decoder(name="fa2", title="FlashAttention-2", make=_sdpa(SDPBackend.FLASH_ATTENTION), compiles=False),
    Decoder(name="flex", title="FlexAttention", make=_flex),
)
