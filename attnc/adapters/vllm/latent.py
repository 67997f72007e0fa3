"""What vLLM's two backends of latent attention refuse alike, when a model is made."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionType

from attnc.adapters.specs import refuse


class LatentImpl:
    """The attention of a layer to latents, in front of vLLM's common layer among the bases of a class.

    _title: what messages call it; _caches: vLLM's names of the types of caches that it reads; _unsupported:
    further arguments that it refuses
    """

    dcp_world_size: int

    _title: ClassVar[str]
    _caches: ClassVar[tuple[str, ...]]
    _unsupported: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        """Keeps what a layer asks for; mla_args: ranks, sizes, the indexer or its lists, for vLLM's common
        layer. ValueError names what is not supported.
        """
        refuse(
            self._title,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            **{name: mla_args.get(name) for name in self._unsupported},
        )
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type: expected a decoder's self-attention, got {attn_type!r}")
        if kv_cache_dtype not in self._caches:
            known = ", ".join(self._caches)
            raise ValueError(f"kv_cache_dtype: expected one of {known}, got {kv_cache_dtype!r}")
        common: Any = super().__init__
        common(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        if self.dcp_world_size > 1:
            raise ValueError("dcp_world_size: expected 1, as context parallelism is not supported")
        # Queries keep their 16 bits beside rows of 8.
        self.supports_quant_query_input = False
