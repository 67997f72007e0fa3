"""FlashInfer's prefills: any number of queries of each request, packed end to end, against pages; and one
request alone. Those against packed keys are in `ragged`.
"""

from __future__ import annotations

from functools import partial, partialmethod

import torch

from attnc.adapters.flashinfer.arguments import (
    DType,
    check_backend,
    check_heads,
    check_integer,
    check_split_size,
    choose_dtypes,
    choose_scale,
    choose_tile_rows,
    choose_value_dim,
    declare_mask,
    declare_slopes,
    measure_buffers,
    name_items,
    write_position_terms,
)
from attnc.adapters.flashinfer.masks import flatten_mask
from attnc.adapters.flashinfer.paged import Cache, PagedWrapper
from attnc.adapters.flashinfer.ragged import (
    BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
)
from attnc.adapters.flashinfer.single import attend_alone
from attnc.adapters.flashinfer.wrapper import Result, count_uniform, read_starts
from attnc.adapters.specs import Wanted, number_of, refuse, suits_conversion
from attnc.api.tensors import INTEGERS, GivenTensors


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attends with any number of queries per request, packed end to end, against its pages.

    With use_cuda_graph the buffers say how many requests, pages and bits of masks there may be; a graph
    captured around `run` then serves every later `plan` with as many queries in all.
    """

    #: Whether queries of requests that have as many, and few, share tiles, and programs their keys.
    _shares_tiles = True

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        jit_kwargs: object = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        refuse("BatchPrefillWithPagedKVCacheWrapper", jit_args=jit_args, jit_kwargs=jit_kwargs)
        refuse("BatchPrefillWithPagedKVCacheWrapper", variant_owns_mask=variant_owns_mask)
        check_backend("BatchPrefillWithPagedKVCacheWrapper", backend)
        capacity = None
        if use_cuda_graph:
            sizes = measure_buffers(
                {
                    "qo_indptr_buf": qo_indptr_buf,
                    "paged_kv_indptr_buf": paged_kv_indptr_buf,
                    "paged_kv_indices_buf": paged_kv_indices_buf,
                    "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
                }
            )
            mask = 0 if custom_mask_buf is None else len(custom_mask_buf)
            capacity = {"requests": sizes[3], "pages": sizes[2], "mask": mask}
        super().__init__(float_workspace_buffer, kv_layout, capacity)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Takes the tables of a batch, those of the pages as for decode, and qo_indptr: [B + 1].

        The last query of a request stands at its last key; window_left bounds the keys before a query and
        causal those after it. custom_mask: bool, the rows * keys of each request one after the other, in the
        place of causal; packed_custom_mask: the same as `segment_packbits(..., "little")` packs it.
        use_fp16_qk_reduction, the longest lengths and uniform_q_len change nothing. ValueError names what is
        not supported.
        """
        refuse("plan", **name_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len))
        refuse("plan", max_item_len_ptr=max_item_len_ptr, block_tables=block_tables)
        refuse("plan", seq_lens=seq_lens, seq_lens_q=seq_lens_q, use_token_head_sf=use_token_head_sf)
        heads = check_heads(num_qo_heads, num_kv_heads)
        page = check_integer("plan: page_size", page_size, 1)
        dtype, cache = choose_dtypes(q_data_type, kv_data_type, o_data_type)
        softcap = number_of("plan: logits_soft_cap", logits_soft_cap, 0.0)
        terms = write_position_terms(
            "plan", pos_encoding_mode, softcap, rope_scale=rope_scale, rope_theta=rope_theta
        )
        starts = read_starts("qo_indptr", qo_indptr)
        checked = GivenTensors("plan")
        checked.check("paged_kv_last_page_len", paged_kv_last_page_len, "B", INTEGERS)
        checked.check("qo_indptr", qo_indptr, "B+1", INTEGERS, anywhere=True)
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        csr = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        tables, requests, keys = self._page_tables(names, page, *csr)
        is_masked = custom_mask is not None or packed_custom_mask is not None
        if is_masked:
            keys = tables["kv_len"].tolist() if keys is None else keys
            tables |= self._mask_tables(starts, keys, custom_mask, packed_custom_mask)
        shares_tiles = self._shares_tiles and not self.is_cuda_graph_enabled
        tokens = count_uniform(starts) if shares_tiles else 0
        if not tokens:
            tables["qo_indptr"] = qo_indptr.to(self.device, torch.int32, copy=True)
        value_dim = choose_value_dim(head_dim_qk, head_dim_vo)
        rows = "B, M" if tokens else "T"
        wanted = Wanted(
            name="batch_prefill",
            dtype=dtype,
            head_dim=head_dim_qk,
            scale=choose_scale("plan", sm_scale, head_dim_qk),
            q=f"[{rows}, Hkv * G, D]" + ("" if tokens else " via ragged(qo_indptr)"),
            kv=self._kv_storage(page),
            value=self._kv_storage(page, "Dv") if value_dim else "",
            value_dim=value_dim,
            o=f"[{rows}, Hkv * G, {'Dv' if value_dim else 'D'}]",
            lse=f"[{rows}, Hkv * G]",
            inputs=(
                *(() if tokens else ("qo_indptr: i32[B + 1]",)),
                "block_table: i32[B, P]",
                "kv_len: i32[B]",
                *declare_mask(is_masked),
                *declare_slopes(terms),
            ),
            length="kv_len",
            terms=terms,
            softcap=softcap,
            decode=tokens > 0,
            rows=choose_tile_rows(tokens, heads),
            split=not disable_split_kv,
            split_size=check_split_size(fixed_split_size, page) if tokens else 0,
            cache=cache,
            converts=cache is not None
            and suits_conversion(
                starts[-1],
                heads,
                requests,
                tables["block_table"].numel() * page,
                (head_dim_qk, value_dim or head_dim_qk),
            ),
        )
        self._keep(
            wanted,
            (causal and not is_masked, is_masked),
            window_left,
            heads,
            requests,
            tables,
            tokens=tokens,
            rows=starts[-1],
            keys=None if keys is None else sum(keys),
        )

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Returns what `run` does, with these in the place of what the plan says; a new one compiles once."""
        revise = partial(
            self._revise_all,
            causal=bool(causal),
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        run = partial(self.run, q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
        return self._run_revised(revise, run)

    forward_return_lse = partialmethod(forward, return_lse=True)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: object = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> Result:
    """Returns o: [M, Hq, Dv] of one request's q: [M, Hq, D], and with return_lse lse: f32[M, Hq] in base 2.

    k: [N, Hkv, D], v: [N, Hkv, Dv], or [Hkv, N, ...] where kv_layout is "HND"; of q's type, or of 8 bits. The
    last query stands at the last key. custom_mask: bool[M, N], in the place of causal; packed_custom_mask:
    u8[ceil(M * N / 8)], the lowest bit first, which counts where both are given. k_scale, v_scale: what K and
    V are to be multiplied by; scale_k, scale_v: [Hkv], the same of each head. Raises ValueError or TypeError
    with the name of an argument; scales of queries and rotation are not supported.
    """
    function = "single_prefill_with_kv_cache"
    refuse(function, scale_q=scale_q, kv_cache_sf=kv_cache_sf)
    check_backend(function, backend)
    for name, one, other in (("k", scale_k, k_scale), ("v", scale_v, v_scale)):
        if one is not None and other is not None:
            raise ValueError(f"{function}: scale_{name}: expected None beside {name}_scale, got a tensor")
    if o_dtype is not None and o_dtype != q.dtype:
        raise ValueError(f"{function}: o_dtype: expected {q.dtype}, like q, got {o_dtype}")
    mask = {}
    if custom_mask is not None or packed_custom_mask is not None:
        keys = k.shape[0 if kv_layout == "NHD" else 1]
        mask = flatten_mask([len(q)], [keys], custom_mask, packed_custom_mask, q.device)
    o, lse = attend_alone(
        function,
        q,
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope={"rope_scale": rope_scale, "rope_theta": rope_theta},
        scales={
            "k_scale": k_scale if scale_k is None else scale_k,
            "v_scale": v_scale if scale_v is None else scale_v,
        },
        causal=causal and not mask,
        mask=mask,
    )
    return (o, lse) if return_lse else o


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
