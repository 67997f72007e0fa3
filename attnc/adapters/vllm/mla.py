"""Multi-head latent attention in vLLM 1: decoding from pages of latents, and prompts.

vLLM's common layer makes queries of the latents' width for decoding, and keys and values of all heads for
prompts and for chunks of their contexts, which it joins. So there are two backends, chosen apart:
`AttncMLABackend` decodes and verifies drafts, `AttncMLAPrefill` does the rest.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attnc.adapters.pages import attend, attend_packed
from attnc.adapters.specs import refuse
from attnc.adapters.vllm.caches import UNQUANTISED, Described, OrderedSums
from attnc.adapters.vllm.latent import LatentImpl
from attnc.runtime.slots import store

#: vLLM's common layer hands latents of 8 bits over as this type.
_QUANTISED = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


class AttncMLABackend(Described, MLACommonBackend):  # type: ignore[misc]  # vLLM need not be there
    """attnc to vLLM, as the backend ATTNC_MLA."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*UNQUANTISED, *_QUANTISED]
    _quantised = _QUANTISED

    @staticmethod
    def get_name() -> str:
        return "ATTNC_MLA"

    @staticmethod
    def get_impl_cls() -> type[AttncMLAImpl]:
        return AttncMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttncMLAMetadataBuilder]:
        return AttncMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class AttncMLAMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]  # as above
    """Metadata of a step is vLLM's own. As many drafts of each sequence are decoded together."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True


class AttncMLAImpl(OrderedSums, LatentImpl, MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]  # as above
    """The attention of a layer to latents in pages."""

    _title: ClassVar[str] = "attnc's latent attention"
    _caches: ClassVar[tuple[str, ...]] = (*UNQUANTISED, *_QUANTISED)
    _unsupported: ClassVar[tuple[str, ...]] = ("indexer",)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the attention of decoded tokens to latents, [T, H, kv_lora_rank], and no logsumexp.

        q: [T, H, kv_lora_rank + rope], or its two parts, as many tokens of each sequence
        kv_c_and_k_pe_cache: [num_blocks, block, kv_lora_rank + rope]; of 8 bits they are multiplied by
        layer._k_scale, f32 of one element
        """
        whole = torch.cat(q, -1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        out = whole.new_empty(*whole.shape[:2], self.kv_lora_rank)
        scale = layer._k_scale if self.kv_cache_dtype in _QUANTISED else None
        attend(
            whole,
            kv_c_and_k_pe_cache.unsqueeze(2),
            None,
            out,
            cu_seqlens_q=attn_metadata.query_start_loc,
            seqused_k=decode.seq_lens,
            block_table=decode.block_table,
            scale=self.scale,
            left=-1,
            softcap=0.0,
            by_head={},
            tokens=len(whole) // max(len(decode.seq_lens), 1),
            causal=attn_metadata.causal,
            k_descale=scale,
            v_descale=scale,
            order=self._order,
        )
        return out, None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Writes latents, [T, kv_lora_rank] and [T, 1, rope], to the slots of the tokens; -1 is that of
        padding. Into 8 bits they go divided by k_scale.
        """
        if kv_cache.numel() == 0:
            return
        quantised = _QUANTISED.get(kv_cache_dtype)
        pages = (kv_cache if quantised is None else kv_cache.view(quantised)).unsqueeze(2)
        c, pe = kv_c_normed.unsqueeze(1), k_pe.view(len(k_pe), 1, -1)
        scales = None if quantised is None else (k_scale, k_scale)
        rank = c.shape[-1]
        store(c, pe, pages[..., :rank], pages[..., rank:], slot_mapping.flatten(), scales)


class AttncMLAPrefill(OrderedSums, MLAPrefillBackend):  # type: ignore[misc]  # as above
    """The attention of prompts, and of prompts to chunks of their contexts, as the prefill backend CUSTOM."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or bool(device_capability.major >= 8)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        keys = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return all(size % 8 == 0 and size <= 256 for size in (keys, mla_dimensions.v_head_dim))

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns the attention of new tokens to each other, [T, H, Dv], and its logsumexp, f32[H, T], if
        asked.

        q, k: [T, H, D]; v: [T, H, Dv]; out: where it goes. ValueError for outputs of 8 bits.
        """
        refuse("attnc's latent attention", output_scale=output_scale)
        starts = self._prefill_metadata.query_start_loc
        return self._attend(q, k, v, starts, starts, causal=True, lse=return_softmax_lse, out=out)

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the attention of new tokens to a chunk of their contexts, as above, and its logsumexp."""
        starts = chunk.query_start_loc, chunk.cu_seq_lens
        found = self._attend(q, k, v, *starts, causal=False, lse=True, out=out)
        assert isinstance(found, tuple)
        return found

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        key_starts: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        options |= {"scale": self.scale, "order": self._order}
        return attend_packed(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=key_starts, **options)
