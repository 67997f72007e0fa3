"""FlashInfer's wrapper of multi-head latent attention: queries that have absorbed the projections of K and V,
against pages of latents and of rotated keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from attnc.adapters.flashinfer.arguments import (
    LN2,
    DType,
    check_backend,
    check_integer,
    choose_dtypes,
    choose_scale,
    choose_tile_rows,
    describe_shape,
    measure_buffers,
)
from attnc.adapters.flashinfer.paged import check_room, make_block_table
from attnc.adapters.flashinfer.wrapper import Result, Wrapper, count_uniform, launch, read_starts
from attnc.adapters.specs import Wanted, number_of, refuse
from attnc.api.tensors import INTEGERS, GivenTensors, refuse_gradients

Parts: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MLAPlanMetadata:
    """Tables of a batch, as CSR or dense, as `BatchMLAPagedAttentionWrapper.plan` says; CSR counts where both
    are given.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attends with any number of queries per request against pages of latents, which are keys (beside their
    rotated part) and values at once.

    With use_cuda_graph the buffers say how many requests and pages there may be; a graph captured around
    `run` then serves every later `plan` with as many queries, and as many of each request or not, as the
    first.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        check_backend("BatchMLAPagedAttentionWrapper", backend)
        capacity = None
        if use_cuda_graph:
            buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
            sizes = measure_buffers({**buffers, "kv_len_arr": kv_len_arr})
            capacity = {"requests": sizes[3], "pages": sizes[2]}
        super().__init__(float_workspace_buffer, "NHD", capacity)

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Takes the tables of a batch, as CSR or dense, or both in an `MLAPlanMetadata`.

        qo_indptr, kv_indptr: [B + 1]; kv_indices: [pages in use]; kv_len_arr: [B], keys of each request.
        cum_seq_lens_q: [B + 1]; block_tables: [B, P]; seq_lens: [B], the same.
        sm_scale: of the head dimension before absorption, 1 / sqrt(192) for DeepSeek. causal: the last query
        of a request stands at its last key. Layouts, lse_mode and use_sinks change nothing: `run` takes what
        it is given. ValueError names what is not supported.
        """
        refuse("plan", use_profiler=use_profiler, skip_softmax=skip_softmax)
        if scale_mode not in ("default", "kv-per-tensor") or output_scale != "none":
            raise ValueError(
                "plan: scale_mode, output_scale: expected 'default' or 'kv-per-tensor', and 'none', got"
                f" {scale_mode!r} and {output_scale!r}"
            )
        apart = MLAPlanMetadata.csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        apart = replace(apart, cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens)
        given: Any = apart if metadata is None else metadata
        starts_of_q, tables, requests = self._tables_given(given, page_size)
        heads = check_integer("plan: num_heads", num_heads, 1), 1
        page = check_integer("plan: page_size", page_size, 1)
        width = check_integer("plan: head_dim_ckv", head_dim_ckv, 1)
        rotated = check_integer("plan: head_dim_kpe", head_dim_kpe, 0)
        dtype, cache = choose_dtypes(q_data_type or "bfloat16", kv_data_type, output_dtype or q_data_type)
        starts = read_starts("qo_indptr", starts_of_q)
        if len(starts) != requests + 1:
            raise ValueError(f"qo_indptr: expected {requests + 1} numbers, got {len(starts)}")
        tokens = count_uniform(starts)
        if not tokens:
            tables["qo_indptr"] = starts_of_q.to(self.device, torch.int32, copy=True)
        rows = "B, M" if tokens else "T"
        wanted = Wanted(
            name="latent_attention",
            dtype=dtype,
            head_dim=width + rotated,
            scale=choose_scale("plan", sm_scale, width),
            q=f"[{rows}, Hkv * G, D]" + ("" if tokens else " via ragged(qo_indptr)"),
            kv=f"[B, N, Hkv, D] via paged(block_table, page = {page})",
            value="[B, N, Hkv, Dv] via prefix(k)",
            value_dim=width,
            o=f"[{rows}, Hkv * G, Dv]",
            lse=f"[{rows}, Hkv * G]",
            inputs=(
                *(() if tokens else ("qo_indptr: i32[B + 1]",)),
                "block_table: i32[B, P]",
                "kv_len: i32[B]",
            ),
            length="kv_len",
            decode=tokens > 0,
            rows=choose_tile_rows(tokens, heads),
            cache=cache,
        )
        mask = (bool(causal), False)
        lengths = given.seq_lens if given.kv_indptr is None else given.kv_len_arr
        keys = int(lengths.sum()) if self._capacity is None else None  # no wait, where they are on the host
        self._keep(wanted, mask, -1, heads, requests, tables, tokens=tokens, rows=starts[-1], keys=keys)

    def _tables_given(self, given: Any, page_size: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        page = check_integer("plan: page_size", page_size, 1)
        if given.kv_indptr is not None:
            _require(given, "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
            checked = GivenTensors("plan")
            checked.check("kv_len_arr", given.kv_len_arr, "B", INTEGERS, anywhere=True)
            requests = len(given.kv_len_arr)
            checked.check("kv_indptr", given.kv_indptr, "_", INTEGERS, anywhere=True)
            ends = given.kv_indptr[: requests + 1]  # behind which FlashInfer reads nothing
            axes = {"kv_indptr": (ends, "B+1"), "qo_indptr": (given.qo_indptr, "B+1")}
            for name, (x, shape) in (axes | {"kv_indices": (given.kv_indices, "pages")}).items():
                checked.check(name, x, shape, INTEGERS, anywhere=True)
            tables = self._tables(page, ends, given.kv_indices, given.kv_len_arr)
            return given.qo_indptr, tables, requests
        _require(given, "cum_seq_lens_q", "block_tables", "seq_lens")
        checked = GivenTensors("plan")
        for name, shape in {"seq_lens": "B", "block_tables": "B pages", "cum_seq_lens_q": "B+1"}.items():
            checked.check(name, getattr(given, name), shape, INTEGERS, anywhere=True)
        table, requests = given.block_tables, len(given.seq_lens)
        ends = torch.arange(requests + 1, device=table.device) * table.shape[1]
        return given.cum_seq_lens_q, self._tables(page, ends, table.flatten(), given.seq_lens), requests

    def _tables(
        self, page: int, indptr: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns the block table and lengths, and beside them where the pages of each request are in
        `kv_indices`: what the table is where these pages have to be brought together.
        """
        if self._capacity is None:
            starts = read_starts("kv_indptr", indptr)
            if len(indices) < starts[-1]:
                raise ValueError(f"kv_indices: expected at least {starts[-1]} numbers, got {len(indices)}")
            for b, length in enumerate(lengths.tolist()):
                room = (starts[b + 1] - starts[b]) * page
                if not 0 <= length <= room:
                    raise ValueError(f"kv_len_arr: expected 0 .. {room} for request {b}, got {length}")
            width = max((b - a for a, b in pairwise(starts)), default=0)
        else:
            width = check_room(self._capacity, "kv_indices", len(lengths), len(indices))
            indices = torch.nn.functional.pad(indices, (0, width - len(indices)))
        width = max(width, 1)
        indptr, indices = indptr.to(self.device), indices.to(self.device, copy=True)
        places = torch.arange(max(len(indices), 1), device=self.device)
        return {
            "block_table": make_block_table(width, indptr, indices),
            "kv_len": lengths.to(self.device, torch.int32, copy=True),
            "pages_in_use": indices if len(indices) else places,
            "places": make_block_table(width, indptr, places),
        }

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Parts | None = None,
        kv_cache: Parts | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: object = None,
        bmm2_scale: object = None,
    ) -> Result:
        """Returns o: [T, H, ckv] of q_nope: [T, H, ckv] and q_pe: [T, H, kpe] against ckv_cache: [pages,
        page, ckv] and kpe_cache: [pages, page, kpe], and with return_lse lse: f32[T, H], in base 2 or e.

        query: [T, H, ckv + kpe], or (q_nope, q_pe); kv_cache: [pages, page, ckv + kpe], or (ckv_cache,
        kpe_cache), the same. Where both caches are columns of one tensor, next to each other, they are read
        as they are; else the pages in use are copied in every call. Of 8 bits, ckv_scale and kpe_scale are
        what they are to be multiplied by; where these differ, queries are multiplied by the smaller to the
        larger and rounded. sinks: f32[H]. ValueError or TypeError names an argument that differs from the
        plan or is not supported.
        """
        plan = self._plan_of_run()
        refuse("run", profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table)
        refuse("run", o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        refuse("run", bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
        refuse("run", skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        width = plan.wanted.value_dim
        q_nope, q_pe = _parts(("query", query), ("q_nope", q_nope), ("q_pe", q_pe), width)
        given = _parts(("kv_cache", kv_cache), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache), width)
        caches = tuple(map(self._with_a_page, given))
        scales = self._scales(ckv_scale, kpe_scale)
        _check(plan.wanted, plan.heads[0], plan.rows, q_nope, q_pe, *caches)
        common = None
        if scales is not None:
            common = max(scales, key=abs)
            q_nope, q_pe = (
                x if scale == common else (x * (scale / common)).to(x.dtype)
                for x, scale in zip((q_nope, q_pe), scales, strict=True)
            )
        tables: Mapping[str, torch.Tensor] = plan.tables
        packed = _side_by_side(q_nope, q_pe)
        named = {"q": torch.cat((q_nope, q_pe), -1) if packed is None else packed}
        keys = _side_by_side(*caches)
        if keys is None:
            # A dense table may name anything behind the last page of a request.
            used = tables["pages_in_use"].long().clamp(0, len(caches[0]) - 1)
            keys = torch.cat([_movable(x)[used] for x in caches], -1).view(caches[0].dtype)
            named["block_table"] = tables["places"]
        found = launch(
            plan,
            {**named, "k": keys[:, :, None]},
            k_scale=common,
            v_scale=None if scales is None else scales[0],
            sinks=sinks,
            out=out,
            lse=lse,
            return_lse=return_lse,
        )
        of_call = found[1] if isinstance(found, tuple) else lse
        if of_call is not None and return_lse_base_on_e:
            of_call.mul_(LN2)
        return found

    def _scales(self, ckv_scale: float | None, kpe_scale: float | None) -> tuple[float, float] | None:
        plan = self._plan_of_run()
        if plan.wanted.cache is None:
            refuse("run with a cache of 16 bits", ckv_scale=ckv_scale, kpe_scale=kpe_scale)
            return None
        return number_of("run: ckv_scale", ckv_scale), number_of("run: kpe_scale", kpe_scale)


def _require(given: Any, *names: str) -> None:
    for name in names:
        if not isinstance(x := getattr(given, name), torch.Tensor):
            raise TypeError(f"plan: {name}: expected a tensor, got {type(x).__name__}")


def _parts(
    whole: tuple[str, Any], first: tuple[str, Any], second: tuple[str, Any], width: int
) -> tuple[Any, Any]:
    name, value = whole
    if value is None:
        return first[1], second[1]
    for other, x in (first, second):
        if x is not None:
            raise ValueError(f"run: {other}: expected None beside {name}, got {describe_shape(x)}")
    if isinstance(value, torch.Tensor):
        return value[..., :width], value[..., width:]
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"run: {name}: expected a tensor or a pair of them, got {type(value).__name__}")
    return value[0], value[1]


def _check(
    wanted: Wanted,
    heads: int,
    rows: int | None,
    q_nope: Any,
    q_pe: Any,
    ckv_cache: Any,
    kpe_cache: Any,
) -> None:
    width, rotated = wanted.value_dim, wanted.head_dim - wanted.value_dim
    checked, count = GivenTensors("run", "as planned"), "T" if rows is None else str(rows)
    for name, x, size in (("q_nope", q_nope, width), ("q_pe", q_pe, rotated)):
        checked.check(name, x, f"{count} {heads} {size}", (wanted.dtype,))
    for name, x, size in (("ckv_cache", ckv_cache, width), ("kpe_cache", kpe_cache, rotated)):
        checked.check(name, x, f"P page {size}", (wanted.cache or wanted.dtype,))
    checked.check_pages("ckv_cache", q_nope)
    refuse_gradients("run", q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)


def _side_by_side(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor | None:
    """Returns the one tensor of which both are neighbouring columns, [pages, page, ckv + kpe]; None if there
    is none.
    """
    width, rotated = ckv.shape[2], kpe.shape[2]
    if not rotated:
        return ckv if ckv.stride(2) == 1 else None
    is_next = kpe.data_ptr() == ckv.data_ptr() + width * ckv.element_size()
    if not is_next or ckv.stride() != kpe.stride() or ckv.stride(2) != 1:
        return None
    if ckv.untyped_storage().data_ptr() != kpe.untyped_storage().data_ptr():
        return None
    return ckv.as_strided((*ckv.shape[:2], width + rotated), ckv.stride())


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements, of 8 bits as bytes: torch moves no rows of its float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
