"""An attention backend of SGLang: metadata of a step, prompts and chunks (extend), single tokens (decode).

SGLang keeps a slot for every token of a request in `req_to_token`, and the keys of all slots of a layer in
one pool. Where slots come in pages, that is a table of pages; where they do not, pages of one slot. The
kernels are those of vLLM's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from attnc.adapters.pages import attend
from attnc.adapters.specs import readable, refuse

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAME = "attnc's attention backend"


@dataclass(slots=True)
class AttncMetadata:
    """A step of several requests: cu_seqlens_q: i32[B + 1]; seq_lens: i32[B], with the new tokens;
    page_table: i32[B, P].
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor


class AttncAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang need not be there
    """attnc to SGLang. Decode steps can be captured: no call waits for the device."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        """Raises ValueError for a model, or a way to run it, that the kernels do not compute."""
        super().__init__()
        _refuse_runner(model_runner)
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.is_quantised = model_runner.kv_cache_dtype in _QUANTISED
        self.page: int = model_runner.page_size
        self.max_context_len: int = model_runner.model_config.context_len
        self.device = model_runner.device
        self.forward_metadata: AttncMetadata | None = None
        self._captured: AttncMetadata | None = None
        self._known_layers: set[int] = set()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of a step that no graph captures."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_decode_or_idle():
            cu_seqlens_q = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=self.device)
        elif mode.is_extend_or_draft_extend_or_mixed():
            lengths = batch.extend_seq_lens
            cu_seqlens_q = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens_q[1:])
        else:
            raise ValueError(f"forward_mode: expected decoding or extending, got {mode!r}")
        refuse(_NAME, spec_info=batch.spec_info)
        known = batch.seq_lens_cpu
        longest = self.max_context_len if known is None or not len(known) else int(known.max())
        pages = -(-longest // self.page)
        table = self._pages(batch.req_pool_indices, pages)
        self.forward_metadata = AttncMetadata(cu_seqlens_q, batch.seq_lens.to(torch.int32), table)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the tensors that captured graphs read."""
        pages = -(-self.max_context_len // self.page)
        self._captured = AttncMetadata(
            cu_seqlens_q=torch.arange(max_bs + 1, dtype=torch.int32, device=self.device),
            seq_lens=torch.ones(max_bs, dtype=torch.int32, device=self.device),
            page_table=torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Brings the tensors of a graph up to date before it is captured or replayed. Waits for nothing."""
        batch = forward_batch
        if not batch.forward_mode.is_decode_or_idle():
            raise ValueError(
                f"forward_mode: expected decoding, which graphs are captured of, got {batch.forward_mode!r}"
            )
        assert self._captured is not None, "init_cuda_graph_state comes first"
        count = batch.batch_size
        kept = AttncMetadata(
            self._captured.cu_seqlens_q[: count + 1],
            self._captured.seq_lens[:count],
            self._captured.page_table[:count],
        )
        kept.seq_lens.copy_(batch.seq_lens[:count])
        kept.page_table.copy_(self._pages(batch.req_pool_indices[:count], kept.page_table.shape[1]))
        self.forward_metadata = kept

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Computes the attention of new tokens of several requests, [T, H * D]; k and v are in the pool after
        it.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, unsupported, decode=False)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Computes the attention of one new token of each request, [B, H * D]; k and v are in the pool after
        it.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, unsupported, decode=True)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
        unsupported: dict[str, Any],
        *,
        decode: bool,
    ) -> torch.Tensor:
        if unsupported:
            refuse(_NAME, **unsupported)
        if layer.layer_id not in self._known_layers:
            _refuse_layer(layer)
            self._known_layers.add(layer.layer_id)
        pool, metadata = self.token_to_kv_pool, self.forward_metadata
        assert metadata is not None, "init_forward_metadata comes first"
        # SGLang's pool divides by them what it stores in 8 bits; None is 1.
        scales = (layer.k_scale, layer.v_scale) if self.is_quantised else (None, None)
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), k, v, *scales)
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        out = q.new_empty(q.shape[0], heads * size)
        attend(
            q.view(-1, heads, size),
            pool.get_key_buffer(layer.layer_id).unflatten(0, (-1, self.page)),
            pool.get_value_buffer(layer.layer_id).unflatten(0, (-1, self.page)),
            out.view(-1, heads, size),
            cu_seqlens_q=metadata.cu_seqlens_q,
            seqused_k=metadata.seq_lens,
            block_table=metadata.page_table,
            scale=layer.scaling,
            left=-1 if layer.sliding_window_size is None else layer.sliding_window_size,
            softcap=max(layer.logit_cap, 0.0),
            by_head={"sinks": sinks},
            tokens=int(decode),
            k_descale=scales[0],
            v_descale=scales[1],
        )
        return out

    def _pages(self, requests: torch.Tensor, pages: int) -> torch.Tensor:
        """Returns i32[B, pages], the pages of requests. What lies beyond their lengths is not read."""
        slots = self.req_to_token[requests, : pages * self.page : self.page]
        return slots if self.page == 1 else slots // self.page


def _refuse_runner(runner: Any) -> None:
    config, pool = runner.model_config, runner.token_to_kv_pool
    if runner.use_mla_backend:
        raise ValueError("attention_arch: expected MHA, as multi-head latent attention is not supported")
    if config.is_encoder_decoder:
        raise ValueError("is_encoder_decoder: expected False, as cross attention is not supported")
    cache = runner.kv_cache_dtype
    if cache not in (*_DTYPES, *_QUANTISED):
        expected = ", ".join(map(str, (*_DTYPES, *_QUANTISED)))
        raise ValueError(f"kv_cache_dtype: expected one of {expected}, got {cache}")
    device = torch.device(runner.device)
    if device.type == "cuda" and (why := readable(cache, torch.cuda.get_device_capability(device))):
        raise ValueError(f"kv_cache_dtype: {why}")
    if hasattr(pool, "get_kv_scale_buffer"):
        raise ValueError(
            "kv_cache_dtype: expected one scale for a layer, as those of blocks are not supported"
        )
    if runner.attention_chunk_size is not None:
        raise ValueError(
            "attention_chunk_size: expected None, as chunks are not supported,"
            f" got {runner.attention_chunk_size}"
        )
    if not runner.spec_algorithm.is_none():
        raise ValueError(
            "spec_algorithm: expected none, as trees of drafts are not supported,"
            f" got {runner.spec_algorithm}"
        )
    if hasattr(pool, "translate_loc_from_full_to_swa"):
        raise ValueError(
            "token_to_kv_pool: expected one pool for all layers, got one of sliding windows beside it:"
            " start with --disable-hybrid-swa-memory"
        )
    if runner.kv_index_translator.is_translating:
        raise ValueError(
            "kv_index_translator: expected slots as they are, as unified pools are not supported"
        )


def _refuse_layer(layer: Any) -> None:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        shown = "cross attention" if layer.is_cross_attention else kind
        raise ValueError(f"attn_type: expected a decoder's self-attention, got {shown}")
    if layer.v_head_dim != layer.qk_head_dim:
        raise ValueError(f"v_head_dim: expected {layer.qk_head_dim}, like the keys', got {layer.v_head_dim}")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise ValueError(f"logit_capping_method: expected 'tanh', got {layer.logit_capping_method!r}")
    if layer.pos_encoding_mode != "NONE":
        raise ValueError(f"pos_encoding_mode: expected 'NONE', got {layer.pos_encoding_mode!r}")
    if layer.xai_temperature_len > 0:
        raise ValueError(f"xai_temperature_len: expected none, got {layer.xai_temperature_len}")
