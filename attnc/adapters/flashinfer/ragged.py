"""FlashInfer's prefill of queries against keys and values that are packed end to end, as they are."""

from __future__ import annotations

from functools import partial, partialmethod
from itertools import pairwise
from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import (
    DType,
    check_backend,
    check_heads,
    choose_dtypes,
    choose_scale,
    choose_value_dim,
    declare_mask,
    declare_slopes,
    measure_buffers,
    name_items,
    write_position_terms,
)
from attnc.adapters.flashinfer.wrapper import Result, Wrapper, launch, read_starts
from attnc.adapters.specs import Wanted, number_of, refuse
from attnc.api.tensors import INTEGERS, GivenTensors, refuse_gradients


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attends with any number of queries per request against its keys, both packed end to end.

    With use_cuda_graph the buffers say how many requests there may be; a graph captured around `run` then
    serves every later `plan` with as many queries and keys in all.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        jit_kwargs: object = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse("BatchPrefillWithRaggedKVCacheWrapper", jit_args=jit_args, jit_kwargs=jit_kwargs)
        refuse("BatchPrefillWithRaggedKVCacheWrapper", variant_owns_mask=variant_owns_mask)
        check_backend("BatchPrefillWithRaggedKVCacheWrapper", backend)
        capacity = None
        if use_cuda_graph:
            buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
            mask = 0 if custom_mask_buf is None else len(custom_mask_buf)
            capacity = {"requests": measure_buffers(buffers)[0] - 1, "mask": mask}
        super().__init__(float_workspace_buffer, kv_layout, capacity)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Takes where requests begin: qo_indptr, kv_indptr: [B + 1].

        The rest as of `BatchPrefillWithPagedKVCacheWrapper.plan`; keys are never split, whatever is said of
        it. Latent attention without absorption has head_dim_qk = 192 and head_dim_vo = 128. ValueError names
        what is not supported.
        """
        refuse("plan", **name_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len))
        refuse("plan", max_item_len_ptr=max_item_len_ptr, v_indptr=v_indptr, o_indptr=o_indptr)
        refuse("plan", seq_lens=seq_lens, seq_lens_q=seq_lens_q, use_token_head_sf=use_token_head_sf)
        heads = check_heads(num_qo_heads, num_kv_heads)
        dtype, cache = choose_dtypes(q_data_type, kv_data_type, o_data_type)
        softcap = number_of("plan: logits_soft_cap", logits_soft_cap, 0.0)
        terms = write_position_terms(
            "plan", pos_encoding_mode, softcap, rope_scale=rope_scale, rope_theta=rope_theta
        )
        starts, keys = (
            read_starts(name, device) if host is None else read_starts(f"{name}_cpu", host)
            for name, device, host in (
                ("qo_indptr", qo_indptr, qo_indptr_cpu),
                ("kv_indptr", kv_indptr, kv_indptr_cpu),
            )
        )
        requests = len(starts) - 1
        if len(keys) != len(starts):
            raise ValueError(f"kv_indptr: expected {len(starts)} numbers, like qo_indptr, got {len(keys)}")
        given = GivenTensors("plan")
        given.check("qo_indptr", qo_indptr, [requests + 1], INTEGERS, anywhere=True)
        given.check("kv_indptr", kv_indptr, [requests + 1], INTEGERS, anywhere=True)
        if self._capacity is not None and requests != self._capacity["requests"]:
            expected = self._capacity["requests"]
            raise ValueError(f"qo_indptr: expected {expected} requests, as in the buffers, got {requests}")
        tables = {
            "qo_indptr": qo_indptr.to(self.device, torch.int32, copy=True),
            "kv_indptr": kv_indptr.to(self.device, torch.int32, copy=True),
        }
        is_masked = custom_mask is not None or packed_custom_mask is not None
        if is_masked:
            lengths = [b - a for a, b in pairwise(keys)]
            tables |= self._mask_tables(starts, lengths, custom_mask, packed_custom_mask)
        value_dim = choose_value_dim(head_dim_qk, head_dim_vo)
        wanted = Wanted(
            name="ragged_prefill",
            dtype=dtype,
            head_dim=head_dim_qk,
            scale=choose_scale("plan", sm_scale, head_dim_qk),
            q="[T, Hkv * G, D] via ragged(qo_indptr)",
            kv="[S, Hkv, D] via ragged(kv_indptr)",
            value="[S, Hkv, Dv] via ragged(kv_indptr)" if value_dim else "",
            value_dim=value_dim,
            o=f"[T, Hkv * G, {'Dv' if value_dim else 'D'}]",
            lse="[T, Hkv * G]",
            inputs=(
                "qo_indptr: i32[B + 1]",
                "kv_indptr: i32[B + 1]",
                *declare_mask(is_masked),
                *declare_slopes(terms),
            ),
            length="",
            terms=terms,
            softcap=softcap,
            cache=cache,
        )
        mask = (causal and not is_masked, is_masked)
        self._keep(wanted, mask, window_left, heads, requests, tables, rows=starts[-1])
        self._keys = keys[-1]

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        run = partial(self.run, q, k, v, return_lse=return_lse)
        return self._run_revised(revise, run)

    forward_return_lse = partialmethod(forward, return_lse=True)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        **unsupported: object,
    ) -> Result:
        """Returns o: [T, Hq, Dv] of q: [T, Hq, D], k: [S, Hkv, D] and v: [S, Hkv, Dv], or [Hkv, S, ...] where
        kv_layout is "HND", and with return_lse lse: f32[T, Hq] in base 2. Scales as of decoding. ValueError
        or TypeError names an argument that differs from the plan or is not supported.
        """
        plan = self._plan_of_run()
        refuse("run", **unsupported)
        if o_scale not in (None, 1):
            raise ValueError(f"run: o_scale: expected None or 1.0, got {o_scale!r}")
        self._check(q, k, v)
        if self._layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return launch(
            plan,
            {"q": q, "k": k, "v": v},
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
        )

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        plan = self._plan_of_run()
        checked, planned, (heads, shared) = GivenTensors("run", "as planned"), plan.wanted, plan.heads
        rows, keys = ("T", "S") if plan.rows is None else (plan.rows, self._keys)
        checked.check("q", q, f"{rows} {heads} {planned.head_dim}", (planned.dtype,))
        before = f"{keys} {shared}" if self._layout == "NHD" else f"{shared} {keys}"
        cached = planned.cache or planned.dtype
        for name, x, width in (("k", k, planned.head_dim), ("v", v, planned.value_dim or planned.head_dim)):
            checked.check(name, x, f"{before} {width}", (cached,))
        checked.check_rows(q=q, k=k, v=v)
        refuse_gradients("run", q=q, k=k, v=v)

    def run_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Result:
        """Returns (o, lse), as `run` does."""
        return self.run(q, k, v, return_lse=True, **options)
