"""Every argument of what stands in for other libraries is on the page that says what becomes of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnc
from attnc.adapters import flashinfer, transformers, vllm
from attnc.compat import flash_attn
from attnc.flex import flex_attention
from tests.adapters.engines import engine

DOCS = Path(__file__).parent.parent / "docs"
WRAPPERS = (
    flashinfer.BatchDecodeWithPagedKVCacheWrapper,
    flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    flashinfer.BatchMLAPagedAttentionWrapper,
    flashinfer.MultiLevelCascadeAttentionWrapper,
    flashinfer.BatchAttention,
    flashinfer.BatchAttentionWithAttentionSinkWrapper,
    flashinfer.BatchDecodeWithAttentionSinkWrapper,
    flashinfer.BatchPODWithPagedKVCacheWrapper,
    flashinfer.PODWithPagedKVCacheWrapper,
    flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper,
    flashinfer.BlockSparseAttentionWrapper,
    flashinfer.VariableBlockSparseAttentionWrapper,
)
SURFACES: dict[str, list[Callable[..., Any]]] = {
    "python": [attnc.compile],
    "flex": [flex_attention],
    "compat": [
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_varlen_func,
        flash_attn.flash_attn_with_kvcache,
    ],
    "serving": [
        vllm.unified_attention,
        *(method for wrapper in WRAPPERS for method in (wrapper.__init__, wrapper.plan, wrapper.run)),
        flashinfer.single_prefill_with_kv_cache,
        flashinfer.single_decode_with_kv_cache,
        flashinfer.merge_state,
        flashinfer.merge_state_in_place,
        flashinfer.merge_states,
        flashinfer.packbits,
        flashinfer.convert_bsr_mask_layout,
        flashinfer.append_paged_kv_cache,
        flashinfer.append_paged_mla_kv_cache,
        flashinfer.get_batch_indices_positions,
        transformers.attention,
        transformers.mask,
    ],
}


def missing(page: str, function: Callable[..., Any]) -> list[str]:
    """Parameters of a function that its page does not name."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    cells = [line for line in text.splitlines() if line.startswith("|")]
    named = {
        word for cell in cells for code in re.findall(r"`([^`]+)`", cell) for word in re.findall(r"\w+", code)
    }
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in named
        and name not in ("self", "module")
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


@pytest.mark.parametrize(
    ("page", "function"),
    [(page, function) for page, functions in SURFACES.items() for function in functions],
    ids=lambda value: value if isinstance(value, str) else value.__qualname__,
)
def test_every_argument_has_a_row(page: str, function: Callable[..., Any]) -> None:
    assert missing(page, function) == []


def test_so_have_those_of_the_engines_layers() -> None:
    with engine("vllm", "attnc.adapters.vllm.backend") as backend:
        assert missing("serving", backend.AttncImpl.__init__) == []
    with engine("sglang", "attnc.adapters.sglang.backend") as backend:
        given = {"layer", "forward_batch"}
        for forward in (backend.AttncAttnBackend.forward_extend, backend.AttncAttnBackend.forward_decode):
            assert set(missing("serving", forward)) <= given
