"""Functions that users hand tensors to, each with a call that is right: what `test_wrong_tensors` spoils."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

import attnc
from attnc.adapters import flash_mla, flashinfer, transformers, vllm
from attnc.compat import flash_attn, sdpa
from attnc.distributed import ContextParallel
from attnc.distributed.group import Alone
from attnc.flex import flex_attention
from attnc.paging import PagedCache

Tensors: TypeAlias = Mapping[str, Any]

B, M, N, H, HKV, D, PAGE = 2, 5, 9, 4, 2, 16, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A function and a call of it that is right.

    make: the tensors of the call, new each time; call: of tensors by these names. named: what messages call
    tensors besides; taken: arguments and what they may also be; written: arguments that the call writes to;
    detached: floats through which, as documented, no gradient flows.
    """

    make: Callable[[], dict[str, Any]]
    call: Callable[..., Any]
    named: tuple[str, ...] = ()
    taken: frozenset[tuple[str, str]] = frozenset()
    written: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _dense() -> dict[str, Any]:
    return {"q": _random(B, M, H, D), "k": _random(B, N, HKV, D), "v": _random(B, N, HKV, D)}


def _packed() -> dict[str, Any]:
    return {
        "q": _random(2 * M, H, D),
        "k": _random(2 * N, HKV, D),
        "v": _random(2 * N, HKV, D),
        "cu_seqlens_q": _ints(0, M, 2 * M),
        "cu_seqlens_k": _ints(0, N, 2 * N),
    }


def _paged(k: str = "k", v: str = "v") -> dict[str, Any]:
    return {k: _random(B, PAGE, HKV, D), v: _random(B, PAGE, HKV, D)}


# --- attnc.compile ------------------------------------------------------------------------------------------

SPEC = """
attention door {
  input q: f32[B, M, Hkv * G, 16]
  input k, v: f32[B, N, Hkv, 16]
  input bias: f32[Hkv * G, M, N]
  input sink: f32[Hkv * G]
  input cap: f32[]
  input kv_len: i32[B]
  length N = kv_len[b]
  score = softcap(dot(q, k), cap) + bias[h, q_idx, kv_idx]
  mask = causal
  normalize = softmax(sink = sink[h])
  output o: f32[B, M, Hkv * G, 16]
  output lse: f32[B, M, Hkv * G]
  grad q, k, v, sink
}
"""

DECODE = """
attention decode_door {
  input q: f32[B, M, Hkv * G, 16]
  input k, v: f32[B, N, Hkv, 16] via paged(table, page = 16)
  input table: i32[B, P]
  input kv_len: i32[B]
  length N = kv_len[b]
  score = dot(q, k) / 4
  mask = causal
  normalize = softmax
  output o: f32[B, M, Hkv * G, 16]
}
schedule decode_door for triton { loops = [kv], tile.q = 16, tile.kv = 16, split.kv = auto }
"""


@cache
def family_of(text: str) -> Any:
    return attnc.compile(text, target="triton")


def _compiled_tensors() -> dict[str, Any]:
    out = {"o": torch.empty(B, M, H, D), "lse": torch.empty(B, M, H)}
    own = {"bias": _random(H, M, N), "sink": _random(H), "cap": torch.tensor(3.0), "kv_len": _ints(N, 4)}
    return {**_dense(), **own, **out}


def _compiled(o: Any, lse: Any, **tensors: Any) -> Any:
    return family_of(SPEC)(**tensors, out=(o, lse))


def _decode_tensors() -> dict[str, Any]:
    table = torch.arange(B, dtype=torch.int32).view(B, 1)
    return {"q": _random(B, 1, H, D), **_paged(), "table": table, "kv_len": _ints(N, 4)}


# --- FlexAttention ------------------------------------------------------------------------------------------


def _flex_tensors() -> dict[str, Any]:
    turned = {"query": _random(B, H, M, D), "key": _random(B, HKV, N, D), "value": _random(B, HKV, N, D)}
    return {**turned, "bias": _random(H, N)}


def _flex(query: Any, key: Any, value: Any, bias: Any) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, kv_idx]

    return flex_attention(query, key, value, score_mod=score_mod, enable_gqa=True)


# --- flash-attention ----------------------------------------------------------------------------------------


def _flash_tensors() -> dict[str, Any]:
    return {**_dense(), "alibi_slopes": _random(H), "s_aux": _random(H), "out": torch.empty(B, M, H, D)}


def _varlen_tensors() -> dict[str, Any]:
    used = {"seqused_q": _ints(M, 3), "seqused_k": _ints(N, 4)}
    return {**_packed(), **used, "alibi_slopes": _random(B, H), "out": torch.empty(2 * M, H, D)}


def _table() -> torch.Tensor:
    return torch.arange(B, dtype=torch.int32).view(B, 1)


def _varlen_paged_tensors() -> dict[str, Any]:
    packed = _packed()
    own = {"q": packed["q"], **_paged(), "cu_seqlens_q": packed["cu_seqlens_q"]}
    return {**own, "seqused_k": _ints(N, 4), "block_table": _table()}


def _cache_tensors() -> dict[str, Any]:
    return {
        "q": _random(B, M, H, D),
        **_paged("k_cache", "v_cache"),
        "k": _random(B, 2, HKV, D),
        "v": _random(B, 2, HKV, D),
        "rotary_cos": _random(32, D // 2),
        "rotary_sin": _random(32, D // 2),
        "cache_seqlens": _ints(N, 4),
        "cache_leftpad": _ints(0, 1),
    }


def _cache_paged_tensors() -> dict[str, Any]:
    own = {"q": _random(B, M, H, D), **_paged("k_cache", "v_cache")}
    return {**own, "cache_seqlens": _ints(N, 4), "block_table": _table()}


def _cache_chosen_tensors() -> dict[str, Any]:
    own = {"q": _random(B, M, H, D), **_paged("k_cache", "v_cache")}
    return {**own, "cache_seqlens": _ints(N, 4), "cache_batch_idx": _ints(1, 0)}


# --- PyTorch ------------------------------------------------------------------------------------------------


def _sdpa_tensors() -> dict[str, Any]:
    return {"query": _random(B, H, M, D), "key": _random(B, HKV, N, D), "value": _random(B, HKV, N, D)}


# --- transformers, vLLM -------------------------------------------------------------------------------------


def _transformers_tensors() -> dict[str, Any]:
    return {**_sdpa_tensors(), "attention_mask": _random(B, 1, M, N), "s_aux": _random(H)}


def _transformers(**tensors: Any) -> Any:
    return transformers.attention(torch.nn.Module(), **tensors, is_causal=False)[0]


def _vllm_tensors() -> dict[str, Any]:
    packed = _packed()
    return {
        "q": packed["q"],
        **_paged(),
        "out": torch.empty(2 * M, H, D),
        "cu_seqlens_q": packed["cu_seqlens_q"],
        "seqused_k": _ints(N, 5),
        "block_table": _table(),
        "alibi_slopes": _random(H),
        "sinks": _random(H),
    }


def _vllm(**tensors: Any) -> Any:
    vllm.unified_attention(
        **tensors, max_seqlen_q=M, max_seqlen_k=N, softmax_scale=0.25, causal=True, window_size=(-1, -1),
        softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip
    return tensors["out"]


#: An engine's function, through which no gradients flow.
_VLLM: Any = {
    "written": ("out",),
    "detached": ("q", "k", "v", "out", "alibi_slopes", "sinks", "qq_bias"),
}


def _bias_tensors() -> dict[str, Any]:
    found = _vllm_tensors()
    del found["alibi_slopes"], found["sinks"]
    return {**found, "qq_bias": _random(M, M)}


# --- FlashMLA, FlashInfer -----------------------------------------------------------------------------------


def _sparse_tensors() -> dict[str, Any]:
    return {
        "q": _random(M, H, 32),
        "kv": _random(N, 1, 32),
        "indices": torch.arange(M * 4, dtype=torch.int32).view(M, 1, 4) % N,
        "attn_sink": _random(H),
        "topk_length": _ints(4, 3, 2, 1, 0),
    }


def _latent_tensors() -> dict[str, Any]:
    own = {"q": _random(B, 1, H, 32), "k_cache": _random(B, PAGE, 1, 32), "block_table": _table()}
    return {**own, "cache_seqlens": _ints(N, 4), "attn_sink": _random(H)}


def _latent(**tensors: Any) -> Any:
    return flash_mla.flash_mla_with_kvcache(**tensors, head_dim_v=16, causal=True)


def _single_tensors() -> dict[str, Any]:
    return {"q": _random(M, H, D), "k": _random(N, HKV, D), "v": _random(N, HKV, D)}


def _decode_plan_tensors() -> dict[str, Any]:
    plan = {"indptr": _ints(0, 1, 2), "indices": _ints(0, 1), "last_page_len": _ints(N, 4)}
    return {**plan, "q": _random(B, H, D), **_paged(), "out": torch.empty(B, H, D)}


def _decode_wrapper(q: Any, k: Any, v: Any, out: Any, **plan: Any) -> Any:
    made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    made.plan(**plan, num_qo_heads=H, num_kv_heads=HKV, head_dim=D, page_size=PAGE, q_data_type=torch.float32)
    return made.run(q, (k, v), out=out)


def _prefill_plan_tensors() -> dict[str, Any]:
    plan = {
        "qo_indptr": _ints(0, M, 2 * M),
        "paged_kv_indptr": _ints(0, 1, 2),
        "paged_kv_indices": _ints(0, 1),
        "paged_kv_last_page_len": _ints(N, 5),
    }
    return {**plan, "q": _random(2 * M, H, D), **_paged()}


def _prefill_wrapper(q: Any, k: Any, v: Any, **plan: Any) -> Any:
    made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    sizes: Any = {"num_qo_heads": H, "num_kv_heads": HKV, "head_dim_qk": D, "page_size": PAGE}
    made.plan(**plan, **sizes, q_data_type=torch.float32)
    return made.run(q, (k, v))


def _ragged_tensors() -> dict[str, Any]:
    own = {"qo_indptr": _ints(0, M, 2 * M), "kv_indptr": _ints(0, N, 2 * N)}
    return {**own, "q": _random(2 * M, H, D), "k": _random(2 * N, HKV, D), "v": _random(2 * N, HKV, D)}


def _ragged_wrapper(q: Any, k: Any, v: Any, **plan: Any) -> Any:
    made = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
    sizes: Any = {"num_qo_heads": H, "num_kv_heads": HKV, "head_dim_qk": D}
    made.plan(**plan, **sizes, q_data_type=torch.float32)
    return made.run(q, k, v)


def _latent_plan_tensors() -> dict[str, Any]:
    plan = {
        "qo_indptr": _ints(0, 1, 2),
        "kv_indptr": _ints(0, 1, 2),
        "kv_indices": _ints(0, 1),
        "kv_len_arr": _ints(N, 4),
    }
    q = {"q_nope": _random(B, H, 32), "q_pe": _random(B, H, D)}
    return {**plan, **q, "ckv_cache": _random(B, PAGE, 32), "kpe_cache": _random(B, PAGE, D)}


def _latent_wrapper(q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, **plan: Any) -> Any:
    made = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0))
    made.plan(
        **plan, num_heads=H, head_dim_ckv=32, head_dim_kpe=D, page_size=PAGE, causal=True, sm_scale=0.2,
        q_data_type=torch.float32, kv_data_type=torch.float32,
    )  # fmt: skip
    return made.run(q_nope, q_pe, ckv_cache, kpe_cache)


def _state_tensors() -> dict[str, Any]:
    return {"v_a": _random(M, H, D), "s_a": _random(M, H), "v_b": _random(M, H, D), "s_b": _random(M, H)}


# --- pages, ranks -------------------------------------------------------------------------------------------


def _rows_to_write() -> dict[str, Any]:
    return {"slots": torch.arange(3), "k": _random(3, HKV, D), "v": _random(3, HKV, D)}


def _write(slots: Any, k: Any, v: Any) -> Any:
    cache_of = PagedCache(
        pages=4, page=4, kv_heads=HKV, head_dim=D, sequences=2, max_length=16, dtype=torch.float32
    )
    cache_of.write(slots, k, v)
    return cache_of.k()


_RANKS = """
attention ranks_door {
  input q: f32[B, M, Hkv * G, 16]
  input k, v: f32[B, N, Hkv, 16]
  score = dot(q, k) / 4
  mask = causal
  normalize = softmax
  output o: f32[B, M, Hkv * G, 16]
  output lse: f32[B, M, Hkv * G]
  grad q, k, v
}
schedule ranks_door for triton { tile.q = 16, tile.kv = 16 }
"""


@cache
def _parallel() -> Any:
    return ContextParallel(_RANKS, Alone())


def _ranks(q: Any, k: Any, v: Any) -> Any:
    return _parallel()(*_parallel().shard(q, k, v))


DOORS: dict[str, Door] = {
    "attnc.compile": Door(
        make=_compiled_tensors,
        call=_compiled,
        written=("o", "lse"),
        detached=("o", "lse"),
    ),
    "attnc.compile, decode": Door(make=_decode_tensors, call=lambda **x: family_of(DECODE)(**x)),
    "flex_attention": Door(make=_flex_tensors, call=_flex),
    "flash_attn_func": Door(make=_flash_tensors, call=flash_attn.flash_attn_func, written=("out",)),
    "flash_attn_qkvpacked_func": Door(
        make=lambda: {"qkv": _random(B, M, 3, H, D)}, call=flash_attn.flash_attn_qkvpacked_func
    ),
    "flash_attn_kvpacked_func": Door(
        make=lambda: {"q": _random(B, M, H, D), "kv": _random(B, N, 2, HKV, D)},
        call=flash_attn.flash_attn_kvpacked_func,
    ),
    "flash_attn_varlen_func": Door(
        make=_varlen_tensors, call=flash_attn.flash_attn_varlen_func, written=("out",)
    ),
    "flash_attn_varlen_func, pages": Door(
        make=_varlen_paged_tensors, call=flash_attn.flash_attn_varlen_func, named=("cu_seqlens_k",)
    ),
    "flash_attn_with_kvcache": Door(
        make=_cache_tensors, call=flash_attn.flash_attn_with_kvcache, written=("k_cache", "v_cache")
    ),
    "flash_attn_with_kvcache, pages": Door(
        make=_cache_paged_tensors, call=flash_attn.flash_attn_with_kvcache
    ),
    "flash_attn_with_kvcache, chosen": Door(
        make=_cache_chosen_tensors, call=flash_attn.flash_attn_with_kvcache
    ),
    "scaled_dot_product_attention": Door(
        make=_sdpa_tensors, call=sdpa.sdpa_forward, detached=("query", "key", "value")
    ),
    "transformers": Door(make=_transformers_tensors, call=_transformers),
    "unified_attention": Door(make=_vllm_tensors, call=_vllm, **_VLLM),
    "unified_attention, drafts": Door(make=_bias_tensors, call=_vllm, **_VLLM),
    "flash_mla_sparse_fwd": Door(
        make=_sparse_tensors, call=lambda **x: flash_mla.flash_mla_sparse_fwd(**x, sm_scale=0.2, d_v=16)
    ),
    "flash_mla_with_kvcache": Door(make=_latent_tensors, call=_latent),
    "single_prefill_with_kv_cache": Door(make=_single_tensors, call=flashinfer.single_prefill_with_kv_cache),
    "single_decode_with_kv_cache": Door(
        make=lambda: {**_single_tensors(), "q": _random(H, D)}, call=flashinfer.single_decode_with_kv_cache
    ),
    "BatchDecodeWithPagedKVCacheWrapper": Door(
        make=_decode_plan_tensors,
        call=_decode_wrapper,
        named=("paged_kv_cache",),
        written=("out",),
        detached=("out",),
    ),
    "BatchPrefillWithPagedKVCacheWrapper": Door(
        make=_prefill_plan_tensors, call=_prefill_wrapper, named=("paged_kv_cache",)
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": Door(make=_ragged_tensors, call=_ragged_wrapper),
    "BatchMLAPagedAttentionWrapper": Door(
        make=_latent_plan_tensors, call=_latent_wrapper, named=("cum_seq_lens_q",)
    ),
    "merge_state": Door(make=_state_tensors, call=flashinfer.merge_state),
    "PagedCache.write": Door(make=_rows_to_write, call=_write, detached=("k", "v")),
    "ContextParallel": Door(make=_dense, call=_ranks),
}
