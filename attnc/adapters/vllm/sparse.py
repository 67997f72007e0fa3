"""Latent attention over selected tokens in vLLM 1 (DeepSeek's DSA, GLM-5): decoding, drafts and prompts.

vLLM's common layer finds the rows of the cache of the tokens that an indexer has selected, and attends to
prompts that are shorter than a selection over all keys, by the prefill backend that is chosen. What is left,
the attention of every token to the rows of its list, is here.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from attnc.adapters.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from attnc.adapters.vllm.caches import UNQUANTISED, Described
from attnc.adapters.vllm.latent import LatentImpl

#: vLLM's name of rows of 656 bytes: numbers of e4m3, their scales, and rotary columns of 16 bits.
_PACKED = "fp8_ds_mla"


class AttncSparseMLABackend(Described, AttentionBackend):  # type: ignore[misc]  # vLLM need not be there
    """attnc to vLLM, as the backend ATTNC_MLA_SPARSE."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*UNQUANTISED, _PACKED]

    @staticmethod
    def get_name() -> str:
        return "ATTNC_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[AttncSparseMLAImpl]:
        return AttncSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttncSparseMLAMetadataBuilder]:
        return AttncSparseMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(64)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Returns the spec of a cache whose blocks are whole rows apart: a number says where a row is."""
        return align_blocks_to_rows(spec)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def _find_misfit(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, capability: Any
    ) -> str | None:
        if kv_cache_dtype != _PACKED:
            return super()._find_misfit(head_size, dtype, kv_cache_dtype, capability)
        if dtype == torch.bfloat16 and head_size == 576:
            return None
        return f"kv_cache_dtype {_PACKED} with a model of {dtype}, whose keys have {head_size} columns"


class AttncSparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder):  # type: ignore[misc]  # as above
    """Metadata of a step is vLLM's own. As many drafts of each sequence are decoded together."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class AttncSparseMLAImpl(LatentImpl, SparseMLACommonImpl[SparseMLACommonMetadata]):  # type: ignore[misc]  # as above
    """The attention of a layer to the rows that lists name."""

    _title: ClassVar[str] = "attnc's sparse latent attention"
    _caches: ClassVar[tuple[str, ...]] = (*UNQUANTISED, _PACKED)
    #: vLLM converts what layers share once in a step where all of its tokens are decoded.
    group_conversion_decode_only: ClassVar[bool] = True

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the attention of tokens to the rows of their lists, [T, H, kv_lora_rank], and no logsumexp.

        q: [T, H, kv_lora_rank + rope], or its two parts
        kv_cache: [num_blocks, block, kv_lora_rank + rope], or of rows of 656 bytes
        topk_indices: i32[T, topk], rows as the cache lies flat, -1 anywhere for none; valid_counts, how many
        others there are, is not needed
        """
        whole = torch.cat(q, -1) if isinstance(q, tuple) else q
        if self.kv_cache_dtype == _PACKED:
            out, _ = flash_mla_with_kvcache(
                whole[None],
                kv_cache.unsqueeze(2),
                None,
                None,
                self.kv_lora_rank,
                softmax_scale=self.scale,
                is_fp8_kvcache=True,
                indices=topk_indices[None],
            )
            return out[0], None
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        out, _, _ = flash_mla_sparse_fwd(
            whole,
            rows.unsqueeze(1),
            topk_indices.unsqueeze(1),
            self.scale,
            self.kv_lora_rank,
        )
        return out, None
