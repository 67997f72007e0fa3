"""Who decodes: the generated kernels, compiled from attnc/bench/specs/decode, and what PyTorch brings along.

The peers get the cache as serving systems lay it out, [B, N, Hkv, D], transposed without a copy. None of them
reads pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.decode import PAGE, PAGES, DecodeInputs
from attnc.bench.ours import modules_of
from attnc.runtime.timing import Launch

SPEC = Path(__file__).parent / "specs" / "decode" / "decode.attn"
Make: TypeAlias = Callable[[DecodeInputs], Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """`ours`: a generated kernel rather than a peer; `compiles`: its first launch takes seconds, so that it
    is worth warming up in parallel.
    """

    name: str
    title: str
    make: Make
    ours: bool = False
    compiles: bool = True


def _dense(target: str, name: str, x: DecodeInputs) -> Launch:
    kernel = getattr(modules_of(SPEC, target)[name], name)
    return lambda: kernel(x.q, x.k, x.v, x.kv_len)


def _paged(target: str, name: str, page: int, x: DecodeInputs) -> Launch:
    kernel = getattr(modules_of(SPEC, target)[name], name)
    k, v, table = x.paged(page)
    return lambda: kernel(x.q, k, v, table, x.kv_len)


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


#: What PyTorch brings along.
PEERS: tuple[Decoder, ...] = (
    Decoder(name="cudnn", title="cuDNN", make=_sdpa(SDPBackend.CUDNN_ATTENTION), compiles=False),
    Decoder(name="fa2", title="FlashAttention-2", make=_sdpa(SDPBackend.FLASH_ATTENTION), compiles=False),
    Decoder(name="flex", title="FlexAttention", make=_flex),
)
#: Attentions over pages by the rows of one. Those of fewer than 16 take part where they are named.
PAGED = {page: "paged" if page == PAGE else f"page_{page}" for page in PAGES}
#: All names that `decoders` knows.
NAMES = frozenset({"triton", *PAGED.values(), *(peer.name for peer in PEERS)})


def decoders(names: Collection[str], target: str = "triton") -> tuple[Decoder, ...]:
    """attnc's kernels for a target, those for Triton beside them where `triton` is named, and the peers of
    these names. Names that nobody has are left to the caller.
    """
    is_beside = "triton" in names and target != "triton"
    beside = _ours("triton", names, "triton_", " on Triton") if is_beside else ()
    peers = (peer for peer in PEERS if peer.name in names)
    return (*_ours(target, names), *beside, *peers)


def _ours(target: str, names: Collection[str], prefix: str = "", suffix: str = "") -> Iterator[Decoder]:
    """The kernels for a target, called so that they differ from those for another one."""
    makers: dict[str, tuple[str, Make]] = {"attnc": ("attnc", partial(_dense, target, "dense"))}
    for page, name in PAGED.items():
        if page == PAGE or name in names:
            makers[name] = f"page {page}", partial(_paged, target, name, page)
    makers["unified"] = "unified_max", partial(_dense, target, "unified")
    for name, (title, make) in makers.items():
        yield Decoder(name=f"{prefix}{name}", title=f"{title}{suffix}", make=make, ours=True)
