"""An attention backend of SGLang: metadata of a step, prompts and chunks (extend), single tokens (decode),
and drafts, which are verified as chains or trees.

SGLang keeps a slot for every token of a request in `req_to_token`, and the keys of all slots of a layer in
one pool. Where slots come in pages, that is a table of pages; where they do not, pages of one slot. The
kernels are those of vLLM's adapter. Of latent attention the pool has the latents alone: decoding and short
chunks read them, prompts come with keys and values of their own (`_forward_packed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from attnc.adapters.pages import attend, attend_packed
from attnc.adapters.specs import SEGMENT, readable, refuse

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAME = "attnc's attention backend"


@dataclass(slots=True)
class AttncMetadata:
    """A step of several requests.

    tokens: new ones of each request where all have as many, else 0, and cu_seqlens_q: i32[B + 1] says
    seq_lens: i32[B], with the new tokens; page_table: i32[B, P], pages of `page` slots
    tree: which new tokens see which, as `attend` takes it: bool[B, tokens, tokens], or words of u8 or i32,
    [B, tokens, 1]; or None: all up to their own
    """

    tokens: int
    page: int
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    tree: torch.Tensor | None = None


class AttncAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang need not be there
    """attnc to SGLang. Steps of as many tokens of each request can be captured: no call waits."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        """Raises ValueError for a model, or a way to run it, that the kernels do not compute."""
        super().__init__()
        _refuse_runner(model_runner)
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.is_quantised = model_runner.kv_cache_dtype in _QUANTISED
        self.is_latent: bool = model_runner.use_mla_backend
        self.order = SEGMENT if is_deterministic(model_runner) else 0
        self.page: int = model_runner.page_size
        self.max_context_len: int = model_runner.model_config.context_len
        self.device = model_runner.device
        self.forward_metadata: AttncMetadata | None = None
        self._captured: AttncMetadata | None = None
        self._captured_tree: torch.Tensor | None = None
        self._known_layers: set[int] = set()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of a step that no graph captures."""
        batch = forward_batch
        tokens = new_tokens(batch)
        known = batch.seq_lens_cpu
        longest = self.max_context_len if known is None or not len(known) else int(known.max())
        drafts = _count_appended(batch, tokens)
        pages = -(-min(longest + drafts, self.req_to_token.shape[1]) // self.page)
        cu_seqlens_q = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=self.device)
        if not tokens:
            torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=cu_seqlens_q[1:])
        self.forward_metadata = AttncMetadata(
            tokens,
            self.page,
            cu_seqlens_q,
            (batch.seq_lens + drafts).to(torch.int32),
            self._pages(batch.req_pool_indices, pages),
            _tree(batch, tokens),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pages = -(-self.req_to_token.shape[1] // self.page)
        self._captured = AttncMetadata(
            tokens=1,
            page=self.page,
            cu_seqlens_q=torch.zeros(max_bs + 1, dtype=torch.int32, device=self.device),
            seq_lens=torch.ones(max_bs, dtype=torch.int32, device=self.device),
            page_table=torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device),
        )
        drafts = -(-max_num_tokens // max_bs)
        size = max_bs * drafts * max(drafts, torch.int32.itemsize)
        self._captured_tree = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Brings the tensors of a graph up to date before it is captured or replayed. Waits for nothing."""
        batch = forward_batch
        assert self._captured is not None, "init_cuda_graph_state comes first"
        assert self._captured_tree is not None
        tokens = new_tokens(batch, captured=True)
        if not tokens:
            raise ValueError(
                "forward_mode: expected as many new tokens of each request, which graphs are captured of,"
                f" got {batch.forward_mode!r}"
            )
        count = batch.batch_size
        kept = AttncMetadata(
            tokens,
            self.page,
            self._captured.cu_seqlens_q[: count + 1],
            self._captured.seq_lens[:count],
            self._captured.page_table[:count],
        )
        kept.seq_lens.copy_(batch.seq_lens[:count] + _count_appended(batch, tokens))
        kept.page_table.copy_(self._pages(batch.req_pool_indices[:count], kept.page_table.shape[1]))
        tree = _tree(batch, tokens)
        if tree is not None:
            room = self._captured_tree[: tree.numel() * tree.itemsize]
            kept.tree = room.view(tree.dtype).view(tree.shape).copy_(tree)
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
        """Computes the attention of new tokens of several requests, [T, H * Dv]; k and v are in the pool
        after it. Of latent attention also that of prompts, whose keys and values are no latents.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, unsupported)

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
        """Computes the attention of one new token of each request, [B, H * Dv]; k and v are in the pool after
        it.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, unsupported)

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
    ) -> torch.Tensor:
        if unsupported:
            refuse(_NAME, **unsupported)
        if layer.layer_id not in self._known_layers:
            _refuse_layer(layer)
            self._known_layers.add(layer.layer_id)
        metadata = self.forward_metadata
        assert metadata is not None, "init_forward_metadata comes first"
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self.is_latent and not _reads_latents(layer, keys):
            packed: torch.Tensor = self._forward_packed(q, k, v, layer, batch, metadata)
            return packed
        # A pool divides by them what it stores in 8 bits; None is 1.
        scales = (layer.k_scale, layer.v_scale) if self.is_quantised else (None, None)
        if save_kv_cache and k is not None:
            self._save(k, v, layer, batch, scales)
        if self.is_latent:
            scales, values = (scales[0], scales[0]), None
        else:
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id).unflatten(0, (-1, metadata.page))
        heads = layer.tp_q_head_num
        out = q.new_empty(q.shape[0], heads * layer.v_head_dim)
        attend(
            q.view(-1, heads, layer.qk_head_dim),
            keys.unflatten(0, (-1, metadata.page)),
            values,
            out.view(-1, heads, layer.v_head_dim),
            cu_seqlens_q=metadata.cu_seqlens_q,
            seqused_k=metadata.seq_lens,
            block_table=metadata.page_table,
            scale=layer.scaling,
            left=-1 if layer.sliding_window_size is None else layer.sliding_window_size,
            softcap=max(layer.logit_cap, 0.0),
            by_head={"sinks": sinks},
            tokens=metadata.tokens,
            tree=metadata.tree,
            k_descale=scales[0],
            v_descale=scales[1],
            order=self.order,
        )
        return out

    def _save(
        self, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any, scales: tuple[Any, Any]
    ) -> None:
        where = KVWriteLoc.for_layer(batch, layer)
        if self.is_latent:  # whose pool takes no scales
            k = k if scales[0] is None else k / scales[0]
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)

    def _forward_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        batch: Any,
        metadata: AttncMetadata,
    ) -> Any:
        """Returns the attention of prompts to keys and values that a model of latent attention made of them,
        or of a chunk of their prefix; with its logsumexp, f32[T, H], where the model joins chunks.
        """
        of_a_prefix = bool(batch.attn_attend_prefix_cache)
        ends = (
            batch.prefix_chunk_cu_seq_lens[batch.prefix_chunk_idx] if of_a_prefix else metadata.cu_seqlens_q
        )
        heads, joined = layer.tp_q_head_num, bool(batch.mha_return_lse)
        found = attend_packed(
            q.view(-1, heads, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=ends,
            scale=layer.scaling,
            causal=not of_a_prefix,
            lse=joined,
            order=self.order,
        )
        if isinstance(found, tuple):
            return found[0], found[1].mT.contiguous()
        return found.flatten(1)

    def _pages(self, requests: torch.Tensor, pages: int) -> torch.Tensor:
        slots = self.req_to_token[requests, : pages * self.page : self.page]
        return slots if self.page == 1 else slots // self.page


def new_tokens(batch: Any, *, captured: bool = False) -> int:
    """Returns how many new tokens each request has, where the mode says so, else 0. ValueError for a mode
    that the kernels do not compute. captured: by a graph, where all requests have as many.
    """
    mode, drafts = batch.forward_mode, batch.spec_info
    if mode.is_decode_or_idle():
        return 1
    if mode.is_target_verify():
        return int(drafts.num_tokens_per_req)
    if mode.is_extend_or_draft_extend_or_mixed(include_draft_extend_v2=True):
        return int(drafts.num_tokens_per_req) if captured and mode.is_draft_extend_v2() else 0
    raise ValueError(f"forward_mode: expected decoding, extending or verification, got {mode!r}")


def _count_appended(batch: Any, tokens: int) -> int:
    return tokens if batch.forward_mode.is_target_verify() else 0


def _tree(batch: Any, tokens: int) -> torch.Tensor | None:
    """Returns which drafts see which, as `AttncMetadata.tree`, or None for chains, where the mask is causal.

    SGLang has masks in three forms (`TreeMaskMode`), which sizes and types tell apart: a row of all keys of a
    request for each draft, one request behind another; the drafts alone, as many for each; and these as one
    word for each draft, of 8, 16 or 32 bits.
    """
    drafts = batch.spec_info
    if not batch.forward_mode.is_target_verify() or drafts.custom_mask is None:
        return None
    if getattr(drafts, "topk", 0) == 1:
        return None
    requests: int = batch.batch_size
    mask: torch.Tensor = drafts.custom_mask
    if mask.dtype is not torch.bool:
        return _widen(mask.flatten()[: requests * tokens]).view(requests, tokens, 1)
    if mask.numel() == requests * tokens**2:
        return mask.view(requests, tokens, tokens)
    return _cut_out(mask, batch.seq_lens.long(), tokens)


def _widen(words: torch.Tensor) -> torch.Tensor:
    if words.dtype is torch.uint16:
        return words.view(torch.int16).int() & 0xFFFF
    if words.dtype is torch.uint32:
        return words.view(torch.int32)
    return words


def _cut_out(mask: torch.Tensor, prefixes: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns of a mask of all keys that of the drafts, bool[B, tokens, tokens]."""
    widths = prefixes + tokens
    firsts = (widths * tokens).cumsum(0) - widths * tokens + prefixes
    row = torch.arange(tokens, device=firsts.device)
    at = firsts[:, None, None] + row[:, None] * widths[:, None, None] + row
    tree: torch.Tensor = mask[at.clamp(max=mask.numel() - 1)]
    return tree


def _reads_latents(layer: Any, keys: torch.Tensor) -> bool:
    return bool(layer.tp_k_head_num == 1 and layer.qk_head_dim == keys.shape[-1])


def _refuse_runner(runner: Any) -> None:
    config, pool = runner.model_config, runner.token_to_kv_pool
    if config.is_encoder_decoder:
        raise ValueError("is_encoder_decoder: expected False, as cross attention is not supported")
    cache = runner.kv_cache_dtype
    if cache not in (*_DTYPES, *_QUANTISED):
        expected = ", ".join(map(str, (*_DTYPES, *_QUANTISED)))
        raise ValueError(f"kv_cache_dtype: expected one of {expected}, got {cache}")
    if runner.use_mla_backend and cache is torch.float32:
        raise ValueError(f"kv_cache_dtype: expected 16 or 8 bits for latent attention, got {cache}")
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
    if hasattr(pool, "translate_loc_from_full_to_swa"):
        raise ValueError(
            "token_to_kv_pool: expected one pool for all layers, got one of sliding windows beside it:"
            " start with --disable-hybrid-swa-memory"
        )
    if runner.kv_index_translator.is_translating:
        raise ValueError(
            "kv_index_translator: expected slots as they are, as unified pools are not supported"
        )


def is_deterministic(runner: Any) -> bool:
    """Returns whether SGLang is asked for results that do not depend on the batch."""
    return bool(getattr(getattr(runner, "server_args", None), "enable_deterministic_inference", False))


def _refuse_layer(layer: Any) -> None:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        shown = "cross attention" if layer.is_cross_attention else kind
        raise ValueError(f"attn_type: expected a decoder's self-attention, got {shown}")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise ValueError(f"logit_capping_method: expected 'tanh', got {layer.logit_capping_method!r}")
    if layer.pos_encoding_mode != "NONE":
        raise ValueError(f"pos_encoding_mode: expected 'NONE', got {layer.pos_encoding_mode!r}")
    if layer.xai_temperature_len > 0:
        raise ValueError(f"xai_temperature_len: expected none, got {layer.xai_temperature_len}")
