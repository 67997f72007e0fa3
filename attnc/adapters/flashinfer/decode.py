"""FlashInfer's decoding: few queries of each request against its pages, and one query against all keys."""

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
    declare_slopes,
    measure_buffers,
    write_position_terms,
)
from attnc.adapters.flashinfer.paged import Cache, PagedWrapper
from attnc.adapters.flashinfer.single import attend_alone
from attnc.adapters.flashinfer.wrapper import Result
from attnc.adapters.specs import Wanted, number_of, refuse
from attnc.api.tensors import FLOATS, GivenTensors


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attends with one query per request, or as many of each, against its pages. Of the workspace buffer only
    the device is used.

    With use_cuda_graph the three buffers say how many requests and pages there may be; a graph captured
    around `run` then serves every later `plan`.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        jit_kwargs: object = None,
    ) -> None:
        refuse("BatchDecodeWithPagedKVCacheWrapper", jit_args=jit_args, jit_kwargs=jit_kwargs)
        check_backend("BatchDecodeWithPagedKVCacheWrapper", backend)
        capacity = None
        if use_cuda_graph:
            given = {
                "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
                "paged_kv_indices_buffer": paged_kv_indices_buffer,
                "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
            }
            sizes = measure_buffers(given)
            capacity = {"requests": sizes[2], "pages": sizes[1]}
        super().__init__(float_workspace_buffer, kv_layout, capacity)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Takes the tables of a batch: indptr [B + 1], indices [pages in use], last_page_len [B].

        sm_scale: by default 1 / sqrt(head_dim). window_left, logits_soft_cap: -1 and 0 or None for none.
        fixed_split_size: pages that a program takes, for results that do not depend on the rest of the batch.
        q_len_per_req: queries of every request, causal among themselves unless is_causal is False.
        ValueError names what is not supported: rotation inside of attention, mixed dtypes, block_tables.
        """
        refuse("plan", block_tables=block_tables, seq_lens=seq_lens, use_token_head_sf=use_token_head_sf)
        if window_right != 0:
            raise ValueError(f"plan: window_right: expected 0, got {window_right!r}")
        heads = check_heads(num_qo_heads, num_kv_heads)
        tokens = check_integer("plan: q_len_per_req", q_len_per_req, 1)
        page = check_integer("plan: page_size", page_size, 1)
        dtype, cache = choose_dtypes(
            q_data_type or data_type or "float16", kv_data_type or data_type, o_data_type
        )
        softcap = number_of("plan: logits_soft_cap", logits_soft_cap, 0.0)
        terms = write_position_terms(
            "plan", pos_encoding_mode, softcap, rope_scale=rope_scale, rope_theta=rope_theta
        )
        wanted = Wanted(
            name="batch_decode",
            dtype=dtype,
            head_dim=head_dim,
            scale=choose_scale("plan", sm_scale, head_dim),
            q="[B, M, Hkv * G, D]",
            kv=self._kv_storage(page),
            o="[B, M, Hkv * G, D]",
            lse="[B, M, Hkv * G]",
            inputs=("block_table: i32[B, P]", "kv_len: i32[B]", *declare_slopes(terms)),
            length="kv_len",
            terms=terms,
            softcap=softcap,
            decode=True,
            rows=choose_tile_rows(tokens, heads),
            split=not disable_split_kv,
            split_size=check_split_size(fixed_split_size, page),
            cache=cache,
        )
        names = ("indptr", "indices", "last_page_len")
        tables, requests, keys = self._page_tables(names, page, indptr, indices, last_page_len)
        self._keep(
            wanted,
            (is_causal is not False, False),
            window_left,
            heads,
            requests,
            tables,
            tokens=tokens,
            rows=requests * tokens,
            keys=None if keys is None else sum(keys),
        )

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        run = partial(
            self.run,
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )
        return self._run_revised(revise, run)

    forward_return_lse = partialmethod(forward, return_lse=True)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plans as the wrapper's `plan` does, whose place it takes as `partial(fast_decode_plan, wrapper)`.
    global_override_indptr_cpu: indptr on the host, where it is known there.
    """
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper above with use_cuda_graph."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Returns o: [Hq, D] of one query q: [Hq, D], and with return_lse lse: f32[Hq] in base 2.

    k, v: [N, Hkv, D], or [Hkv, N, D] where kv_layout is "HND". The rest as in `single_prefill_with_kv_cache`.
    """
    function = "single_decode_with_kv_cache"
    GivenTensors(function).check("q", q, "heads head_dim", FLOATS)
    o, lse = attend_alone(
        function,
        q[None],
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope={"rope_scale": rope_scale, "rope_theta": rope_theta},
        scales={"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
    )
    return (o[0], lse[0]) if return_lse else o[0]
