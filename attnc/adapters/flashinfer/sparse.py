"""FlashInfer's attention over blocks: a matrix says which rows of queries see which blocks of keys.

A row of blocks is a request of its own, whose pages are the blocks that it names: what pages are to a kernel,
blocks are, of any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import (
    LN2,
    DType,
    check_backend,
    check_heads,
    check_integer,
    choose_dtypes,
    choose_scale,
    to_dtype,
    write_position_terms,
)
from attnc.adapters.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.wrapper import Result, read_starts
from attnc.adapters.specs import Kernel, Wanted, kernel, made_for, number_of, refuse
from attnc.api.tensors import INTEGERS, GivenTensors, refuse_gradients

#: Of FlashInfer's kernels for blocks, which give o the type of q, and an lse in base e.
_BACKENDS = (
    "cake",
    "cake_cute",
    "vsa_blackwell",
    "vsa_blackwell_blk64",
    "vsa_sm100_blk128",
    "vsa_sm100_blk64",
    "vsa_sm120_blk64",
)
_BOOLEANS = (torch.bool, torch.uint8, *INTEGERS)
#: What sizes of blocks have as a factor where heads have masks of their own: tiles of kernels divide them.
_LEAST = 16
#: Keys of a page at most, where blocks have different sizes.
_MOST = 128


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Returns bool[blocks * R * C] of a mask [blocks, R, C]: the rows of each row of blocks, one after the
    other, each over all of its blocks.
    """
    starts = read_starts("indptr", indptr)
    return _flatten_lines(mask, starts, [mask.shape[1]] * (len(starts) - 1))


def _flatten_lines(mask: torch.Tensor, starts: list[int], counts: list[int]) -> torch.Tensor:
    """Returns the first elements of each row of blocks, counts[i] queries of it."""
    lines = zip(pairwise(starts), counts, strict=True)
    found = [mask[a:b].transpose(0, 1)[:count].flatten() for (a, b), count in lines]
    return torch.cat(found) if found else mask.flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What `run` is held to. rows, keys: M and N; heads: of q, and of K and V; into: the type of o."""

    rows: int
    keys: int
    heads: tuple[int, int]
    size: int
    dtype: torch.dtype
    cached: torch.dtype
    into: torch.dtype

    def check(self, q: Any, k: Any, v: Any, *, by_head: bool) -> None:
        """by_head: heads stand before rows."""
        checked = GivenTensors("run", "as planned")
        for name, x, heads, rows, dtype in (
            ("q", q, self.heads[0], self.rows, self.dtype),
            ("k", k, self.heads[1], self.keys, self.cached),
            ("v", v, self.heads[1], self.keys, self.cached),
        ):
            axes = (heads, rows) if by_head else (rows, heads)
            checked.check(name, x, [*axes, self.size], (dtype,))
        checked.check_rows(q=q, k=k, v=v)
        refuse_gradients("run", q=q, k=k, v=v)

    def check_results(self, q: torch.Tensor, out: Any, lse: Any, shape: list[int]) -> None:
        checked = GivenTensors("run", "as planned")
        checked.check("q", q, q.shape, (q.dtype,))
        if out is not None:
            checked.check("out", out, shape, (self.into,))
            checked.check_rows(out=out)
            refuse_gradients("run", out=out)
        if lse is not None:
            checked.check("lse", lse, shape[:-1], (torch.float32,))


class BlockSparseAttentionWrapper:
    """Attends with M queries against those blocks of N keys that a matrix of blocks [R, C] names, given as
    rows of indices (BSR, as in SciPy), or as a boolean for each block.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        check_backend("BlockSparseAttentionWrapper", backend, *_BACKENDS)
        self._is_of_blocks = backend in _BACKENDS
        self._pages = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD")
        self.device = self._pages.device
        self._call: _Call | None = None
        self._listed: tuple[Kernel, torch.Tensor] | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Takes other workspaces, of which nothing is used."""

    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Takes the blocks: indptr [rows of blocks + 1] and indices [blocks], in the order in which keys
        follow each other, or block_mask: bool[Hq or Hkv, rows of blocks, N / C], which then counts alone.

        The last row of blocks may have fewer than R queries; C divides N. mask: bool[blocks, R, C], or
        packed_mask, as `convert_bsr_mask_layout` and `segment_packbits(..., "little")` make it, each row of
        blocks from a byte of its own: which elements of a block count. causal and ALiBi count the keys of a
        row's blocks, as in FlashInfer. Of a mask for Hq heads, those that share keys have to be equal. o has
        o_data_type, or, with block_mask or a backend for blocks, the type of q, as in FlashInfer. ValueError
        or TypeError names what is not supported: scales of queries, and what FlashInfer's kernels for one
        kind of GPU take besides.
        """
        unsupported = {"kv_block_lens": kv_block_lens, "q2k_indices": q2k_indices, "q2k_num": q2k_num}
        refuse("plan", **unsupported, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        rows, keys, row, column = (
            check_integer(f"plan: {name}", x, least)
            for name, x, least in (("M", M, 0), ("N", N, 0), ("R", R, 1), ("C", C, 1))
        )
        if keys % column:
            raise ValueError(f"plan: N: expected a multiple of C, {column}, got {keys}")
        dtype, cache = choose_dtypes(q_data_type, kv_data_type, None)
        into = made_for("plan: o_data_type", to_dtype("plan: o_data_type", o_data_type))
        is_natural = self._is_of_blocks or block_mask is not None
        call = _Call(
            rows=rows,
            keys=keys,
            heads=check_heads(num_qo_heads, num_kv_heads),
            size=check_integer("plan: head_dim", head_dim, 1),
            dtype=dtype,
            cached=cache or dtype,
            into=dtype if is_natural else into,
        )
        listed = None
        if block_mask is not None:
            refuse(
                "plan with block_mask", mask=mask, packed_mask=packed_mask, causal=causal, kv_data_type=cache
            )
            softcap = number_of("plan: logits_soft_cap", logits_soft_cap, 0.0)
            if write_position_terms("plan", pos_encoding_mode, softcap) or softcap > 0:
                name = "logits_soft_cap" if softcap > 0 else "pos_encoding_mode"
                came = softcap if softcap > 0 else pos_encoding_mode
                raise ValueError(f"plan: {name}: expected none beside block_mask, got {came!r}")
            scale = choose_scale("plan", sm_scale, call.size)
            listed = _make_lists(call, block_mask, row, column, scale, self.device)
        else:
            self._plan_pages(
                call,
                indptr,
                indices,
                (row, column),
                mask,
                packed_mask,
                causal=causal,
                pos_encoding_mode=pos_encoding_mode,
                logits_soft_cap=logits_soft_cap,
                sm_scale=sm_scale,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
            )
        self._call, self._block, self._listed, self._is_natural = call, column, listed, is_natural

    begin_forward = plan

    def _plan_pages(
        self,
        call: _Call,
        indptr: Any,
        indices: Any,
        block: tuple[int, int],
        mask: torch.Tensor | None,
        packed: torch.Tensor | None,
        **score: Any,
    ) -> None:
        starts = _check_matrix(indptr, indices, call.rows, block[0], call.keys // block[1])
        rows = [min(first + block[0], call.rows) for first in range(0, call.rows, block[0])]
        if mask is not None and packed is None:
            GivenTensors("plan").check("mask", mask, [starts[-1], *block], _BOOLEANS, anywhere=True)
            counts = [last - first for first, last in pairwise([0, *rows])]
            mask = _flatten_lines(mask, starts, counts).bool()
        self._pages.plan(
            torch.tensor([0, *rows], dtype=torch.int32),
            indptr,
            indices,
            torch.full((len(rows),), block[1], dtype=torch.int32, device=self.device),
            *call.heads,
            call.size,
            block[1],
            custom_mask=mask,
            packed_custom_mask=packed,
            q_data_type=call.dtype,
            kv_data_type=call.cached,
            **score,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Returns o: [M, Hq, D] of q: [M, Hq, D] and k, v: [N, Hkv, D], and with return_lse lse: f32[M, Hq]
        in base 2, or, with block_mask or a backend for blocks, in base e, as in FlashInfer. ValueError or
        TypeError names an argument that differs from the plan or is not supported: scales, which are of
        queries of 8 bits.
        """
        if self._call is None:
            raise RuntimeError("run: expected a call of plan() before")
        refuse("run", scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        call = self._call
        call.check(q, k, v, by_head=False)
        call.check_results(q, out, lse, [call.rows, call.heads[0], call.size])
        if self._listed is not None:
            attend, blocks = self._listed
            made, natural = (x[0] for x in attend(q[None], k[None], v[None], blocks))
            of_rows = natural if lse is None else lse.copy_(natural)
        else:
            keys, values = (x.view(call.keys // self._block, self._block, *x.shape[1:]) for x in (k, v))
            own = out if call.into == call.dtype else None
            made, of_rows = self._pages.run(q, (keys, values), out=own, lse=lse, return_lse=True)
            of_rows = of_rows.mul_(LN2) if self._is_natural else of_rows
        if made is not out:
            made = made.to(call.into) if out is None else out.copy_(made)
        return (made, of_rows) if return_lse else made


def _check_matrix(indptr: Any, indices: Any, rows: int, row: int, columns: int) -> list[int]:
    """Returns where the blocks of each row of blocks begin. TypeError and ValueError for what is no matrix of
    as many.
    """
    given = GivenTensors("plan")
    given.check("indptr", indptr, [-(-rows // row) + 1], INTEGERS, anywhere=True)
    given.check("indices", indices, "blocks", INTEGERS, anywhere=True)
    starts = read_starts("indptr", indptr)
    if len(indices) != starts[-1]:
        raise ValueError(f"plan: indices: expected {starts[-1]} numbers, as indptr says, got {len(indices)}")
    if len(indices) and not 0 <= (least := int(indices.min())) <= (most := int(indices.max())) < columns:
        raise ValueError(f"plan: indices: expected 0 .. {columns - 1}, got {least} .. {most}")
    return starts


def _make_lists(
    call: _Call, given: Any, row: int, column: int, scale: float, device: torch.device
) -> tuple[Kernel, torch.Tensor]:
    """Returns the kernel for a mask of blocks of each head, and its lists, i32[Hkv, rows of blocks, most
    blocks of one]: the blocks of a row in ascending order, and -1 behind them.
    """
    for name, size in (("R", row), ("C", column)):
        if size % _LEAST:
            raise ValueError(f"plan: {name}: expected a multiple of {_LEAST} beside block_mask, got {size}")
    checked, heads = GivenTensors("plan"), call.heads
    has_all = isinstance(given, torch.Tensor) and given.shape[:1] == heads[:1]
    shape = [heads[0] if has_all else heads[1], -(-call.rows // row), call.keys // column]
    checked.check("block_mask", given, shape, _BOOLEANS, anywhere=True)
    mask = given.to(device, torch.bool)[:: heads[0] // heads[1] if has_all else 1]
    counts = mask.sum(-1)
    most = int(counts.max()) if counts.numel() else 0
    order = torch.argsort(~mask, dim=-1, stable=True)[..., : max(most, 1)]
    places = torch.arange(order.shape[-1], device=device)
    lists = torch.where(places < counts[..., None], order, -1).int()
    if not lists.numel():  # kernels take no tensor without elements
        lists = lists.new_full((heads[1], 1, 1), -1)
    return _kernel_of_lists(call.dtype, call.size, scale, row, column), lists.contiguous()


@lru_cache(maxsize=64)
def _kernel_of_lists(dtype: torch.dtype, size: int, scale: float, row: int, column: int) -> Kernel:
    return kernel(
        Wanted(
            name="block_sparse",
            dtype=dtype,
            head_dim=size,
            scale=scale,
            q="[B, M, Hkv * G, D]",
            kv="[B, N, Hkv, D]",
            o="[B, M, Hkv * G, D]",
            lse="[B, M, Hkv * G]",
            inputs=("blocks: i32[Hkv, R, S]",),
            length="",
            mask=f"listed(blocks[h // G, q_idx // {row}], keys = {column})",
        )
    )


class VariableBlockSparseAttentionWrapper:
    """Attends over blocks of different sizes: each K/V head has its own, and says which row of blocks sees
    which.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        check_backend("VariableBlockSparseAttentionWrapper", backend, *_BACKENDS)
        self._pages = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD")
        self.device = self._pages.device
        self._call: _Call | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Takes other workspaces, of which nothing is used."""

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Takes block_mask_map: bool[Hkv, rows of blocks, columns of blocks], and how many queries and keys
        each has: block_row_sz: [Hkv, rows of blocks], block_col_sz: [Hkv, columns of blocks], whose sums are
        the same for all heads. causal counts the keys of a row's blocks, as in FlashInfer. Sizes of keys with
        a power of two as a factor make larger pages. ValueError or TypeError names what is not supported.
        """
        refuse("plan", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        if pos_encoding_mode != "NONE":  # FlashInfer gives its kernel no slopes here
            raise ValueError(f"plan: pos_encoding_mode: expected 'NONE', got {pos_encoding_mode!r}")
        heads = check_heads(num_qo_heads, num_kv_heads)
        checked = GivenTensors("plan")
        checked.check("block_row_sz", block_row_sz, f"{heads[1]} rows", INTEGERS, anywhere=True)
        checked.check("block_col_sz", block_col_sz, f"{heads[1]} columns", INTEGERS, anywhere=True)
        shape = f"{heads[1]} rows columns"
        checked.check("block_mask_map", block_mask_map, shape, _BOOLEANS, anywhere=True)
        queries = _count("block_row_sz", block_row_sz)
        keys = _count("block_col_sz", block_col_sz)
        dtype, cache = choose_dtypes(q_data_type, kv_data_type, None)
        page = math.gcd(*block_col_sz.flatten().tolist(), _MOST)
        rows, columns = (x.to(self.device, torch.int64) for x in (block_row_sz, block_col_sz))
        indptr, indices = _list_pages(block_mask_map.to(self.device) != 0, columns // page)
        self._pages.plan(
            torch.nn.functional.pad(rows.flatten().cumsum(0), (1, 0)),
            indptr,
            indices,
            torch.full((rows.numel(),), page, dtype=torch.int32, device=self.device),
            heads[0] // heads[1],
            1,
            check_integer("plan: head_dim", head_dim, 1),
            page,
            causal=causal,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=dtype,
            kv_data_type=cache or dtype,
        )
        self._page = page
        self._call = _Call(
            rows=queries,
            keys=keys,
            heads=heads,
            size=head_dim,
            dtype=dtype,
            cached=cache or dtype,
            into=dtype,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Returns o: [Hq, M, D] of q: [Hq, M, D] and k, v: [Hkv, N, D], and with return_lse lse: f32[Hq, M]
        in base 2. out: [Hkv * M, Hq / Hkv, D], and lse, without D, are written too, in the order of
        FlashInfer's kernels. q is copied, and k and v where heads do not follow each other in memory.
        ValueError or TypeError names an argument that differs from the plan.
        """
        if (call := self._call) is None:
            raise RuntimeError("run: expected a call of plan() before")
        call.check(q, k, v, by_head=True)
        group = call.heads[0] // call.heads[1]
        call.check_results(q, out, lse, [call.heads[1] * call.rows, group, call.size])
        rows = q.view(call.heads[1], group, *q.shape[1:]).transpose(1, 2).flatten(0, 1)
        shape = call.heads[1] * call.keys // self._page, self._page, 1, call.size
        found = self._pages.run(rows, (k.reshape(shape), v.reshape(shape)), out=out, lse=lse, return_lse=True)
        o, of_rows = (_by_head(x, call) for x in found)
        return (o, of_rows) if return_lse else o


def _by_head(x: torch.Tensor, call: _Call) -> torch.Tensor:
    """Returns [Hq, M, ...] of what is [Hkv * M, Hq / Hkv, ...]."""
    apart = x.view(call.heads[1], call.rows, *x.shape[1:])
    return apart.transpose(1, 2).flatten(0, 1).contiguous()


def _count(name: str, sizes: torch.Tensor) -> int:
    """Returns how many rows the blocks of each head have. ValueError where some are negative, or not all have
    as many.
    """
    if sizes.numel() and int(sizes.min()) < 0:
        raise ValueError(f"plan: {name}: expected at least 0, got {int(sizes.min())}")
    sums = sizes.sum(1).tolist()
    if len(set(sums)) > 1:
        raise ValueError(f"plan: {name}: expected sizes with the same sum for every head, got {sums}")
    return int(sums[0])


def _list_pages(mask: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns indptr [Hkv * rows of blocks + 1] and indices of the pages of each row of blocks, of a mask
    [Hkv, rows, columns] and the pages of each block [Hkv, columns]; those of a head follow those before.
    """
    begins = pages.flatten().cumsum(0).view_as(pages) - pages
    head, _, column = mask.nonzero(as_tuple=True)
    counts, first = pages[head, column], begins[head, column]
    ends = counts.cumsum(0)
    within = torch.arange(int(counts.sum()), device=mask.device) - (ends - counts).repeat_interleave(counts)
    of_rows = (mask * pages[:, None]).sum(-1).flatten()
    return torch.nn.functional.pad(of_rows.cumsum(0), (1, 0)), first.repeat_interleave(counts) + within
