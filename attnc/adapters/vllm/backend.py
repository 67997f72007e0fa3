"""An attention backend of vLLM 1: metadata, the update of the cache, and the attention itself.

vLLM asks the backend class what it supports, its builder for metadata once a step, and its implementation,
of which every layer has one, to write keys and values to the pages and to attend. What is not supported is
refused where vLLM asks, and again by name where an implementation or metadata are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from attnc.adapters.specs import refuse
from attnc.adapters.vllm import unified_attention
from attnc.adapters.vllm.caches import UNQUANTISED, Described, OrderedSums
from attnc.runtime.slots import store

#: By vLLM's names of a cache of 8 bits the type of its elements.
_QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class AttncBackend(Described, AttentionBackend):  # type: ignore[misc]  # vLLM need not be there
    """attnc to vLLM, as the backend CUSTOM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*UNQUANTISED, *_QUANTISED]
    forward_includes_kv_cache_update: bool = False
    _widest = 256
    _quantised = _QUANTISED

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttncImpl]:
        return AttncImpl

    @staticmethod
    def get_builder_cls() -> type[AttncMetadataBuilder]:
        return AttncMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass(slots=True)
class AttncMetadata:
    """A step of several sequences, the same for all layers of a group.

    num_actual_tokens: without padding; max_query_len: new tokens of a sequence
    causal: a token sees keys up to its own; else all of its sequence
    query_start_loc: i32[B + 1]; seq_lens: i32[B], with the new tokens; block_table: i32[B, P]
    slot_mapping: i64[T], where the keys of new tokens go, -1 for none
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class AttncMetadataBuilder(AttentionMetadataBuilder[AttncMetadata]):  # type: ignore[misc]  # as above
    """Metadata of a step: vLLM's own tensors, so that captured graphs see what the next step writes."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> AttncMetadata:
        """Returns the tensors and numbers that kernels read in a step. Raises ValueError if the step asks for
        something that the kernels do not compute.
        """
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise ValueError(f"causal: expected True or False of all sequences, got {common.causal!r}")
        refuse(
            "attnc's attention backend",
            mm_req_doc_ranges=common.mm_req_doc_ranges,
            encoder_seq_lens=common.encoder_seq_lens,
            dcp_local_seq_lens=common.dcp_local_seq_lens,
            rswa_prefix_lens=common.rswa_prefix_lens,
        )
        return AttncMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> AttncMetadata:
        """Makes metadata as for sequences of one key: how long they are is read when a graph is replayed."""
        metadata = self.build(0, common_attn_metadata)
        metadata.seq_lens.fill_(1)
        return metadata

    def update_block_table(
        self, metadata: AttncMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> AttncMetadata:
        """Returns the metadata of another group of layers, which differs in its pages alone."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class AttncImpl(OrderedSums, AttentionImpl[AttncMetadata]):  # type: ignore[misc]  # as above
    """The attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
        **unsupported: Any,
    ) -> None:
        """Keeps what a layer asks for. sliding_window: keys that a query sees, its own included;
        alibi_slopes, sinks: of each query head.

        ValueError names what is not supported.
        """
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type: expected a decoder's self-attention, got {attn_type!r}")
        if kv_cache_dtype not in (*UNQUANTISED, *_QUANTISED):
            known = ", ".join((*UNQUANTISED, *_QUANTISED))
            raise ValueError(f"kv_cache_dtype: expected one of {known}, got {kv_cache_dtype!r}")
        if chunk_lookback != -1:
            raise ValueError(
                f"chunk_lookback: expected -1, as chunks are not supported, got {chunk_lookback}"
            )
        refuse("attnc's attention backend", use_alibi_sqrt=use_alibi_sqrt, **unsupported)
        for name in ("dcp_world_size", "pcp_world_size"):
            if getattr(self, name, 1) > 1:
                raise ValueError(f"{name}: expected 1, as context parallelism is not supported")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.quantised = _QUANTISED.get(kv_cache_dtype)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttncMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns `output` with the attention of the tokens that are not padding.

        query: [T, H, D]; output: [T, H, Dv]; kv_cache: [num_blocks, Hkv, block, D + Dv], in any order in
        memory, which has key and value already; of 8 bits, layer._k_scale and _v_scale, f32 of one element or
        a K/V head, say what they are multiplied by. Without metadata vLLM looks how much memory it takes:
        output is 0.
        """
        if attn_metadata is None:
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        k, v = self._split(kv_cache)
        unified_attention(
            query[:count],
            k,
            v,
            output[:count],
            attn_metadata.query_start_loc,
            attn_metadata.max_query_len,
            attn_metadata.seq_lens,
            attn_metadata.max_seq_len,
            self.scale,
            attn_metadata.causal,
            self.window,
            attn_metadata.block_table,
            self.logits_soft_cap,
            None,
            *((layer._k_scale, layer._v_scale) if self.quantised else (None, None)),
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            output_scale=output_scale,
            output_block_scale=output_block_scale,
            order=self._order,
            are_uniform=True,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes key and value, [T, Hkv, D], to the slots of the tokens, i64[T]; -1 is that of padding. Into
        8 bits they go divided by the layer's scales.
        """
        scales = (layer._k_scale, layer._v_scale) if self.quantised else None
        store(key, value, *self._split(kv_cache), slot_mapping, scales)

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values as kernels take pages, [num_blocks, block, Hkv, D] and Dv. vLLM hands 8
        bits over as bytes.
        """
        kv_cache = kv_cache if self.quantised is None else kv_cache.view(self.quantised)
        pages = kv_cache.transpose(1, 2)
        return pages[..., : self.head_size], pages[..., self.head_size :]
