"""What wrappers of pages share: tables as CSR and as kernels read them, and the call of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from attnc.adapters.flashinfer.wrapper import Result, Wrapper, check_call, launch, read_starts
from attnc.adapters.specs import refuse
from attnc.api.tensors import INTEGERS, GivenTensors

Cache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def make_tables(
    page: int, width: int, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns block_table: i32[B, width] and kv_len: i32[B] of CSR tables, computed where those are.

    indptr: [B + 1]; indices: [pages in use]; last_page_len: [B], 1 .. page, not read where B has no page.
    Entries past a sequence's pages are pages of other sequences.
    """
    counts = indptr.diff()
    kv_len = torch.where(counts > 0, (counts - 1) * page + last_page_len, 0)
    return make_block_table(width, indptr, indices), kv_len.int()


def make_block_table(width: int, indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the block table alone, as `make_tables` does."""
    at = indptr[:-1, None] + torch.arange(width, device=indptr.device)
    table = indices[at.clamp(max=len(indices) - 1)] if len(indices) else torch.zeros_like(at)
    return table.int().contiguous()


def check_room(capacity: Mapping[str, int], name: str, requests: int, pages: int) -> int:
    """Returns the pages that the buffers of a graph have room for. ValueError for more, or for another number
    of requests.
    """
    batch, width = capacity["requests"], capacity["pages"]
    if requests != batch or pages > width:
        raise ValueError(
            f"{name}: expected {batch} sequences with at most {width} pages, as in the buffers,"
            f" got {requests} with {pages}"
        )
    return width


def split_cache(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pages of keys and of values. ValueError and TypeError for what is neither a pair nor one
    tensor of both.
    """
    if isinstance(cache, torch.Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache: expected shape [pages, 2, ...] with 5 axes, got {list(cache.shape)}"
            )
        return cache[:, 0], cache[:, 1]
    pair: Any = cache
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"paged_kv_cache: expected a tensor or (K, V), got {type(cache).__name__}")
    return pair[0], pair[1]


class PagedWrapper(Wrapper):
    """Reads K and V from pages."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        **unsupported: object,
    ) -> Result:
        """Returns o: [T, Hq, D] of q: [T, Hq, D], and with return_lse lse: f32[T, Hq] in base 2; T is B, or B
        times q_len_per_req.

        paged_kv_cache: (K, V), each [pages, page, Hkv, D] or [pages, Hkv, page, D] as kv_layout says, or one
        tensor with an axis of two after that of pages. k_scale, v_scale: what K and V are to be multiplied
        by, a number, or f32 of one element or for each K/V head; q_scale likewise. window_left: in place of
        the plan's. sinks: f32[Hq], a logit that joins the denominator of a head. ValueError or TypeError
        names an argument that differs from the plan or is not supported.
        """
        plan = self._plan_of_run()
        refuse("run", **unsupported)
        k, v = map(self._with_a_page, split_cache(paged_kv_cache))
        heads_at = 2 if self._layout == "NHD" else 1
        return launch(
            plan,
            {"q": q, "k": k, "v": v},
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            window_left=window_left,
            out=out,
            lse=lse,
            return_lse=return_lse,
            check=lambda: check_call(plan, q, k, v, heads_at, "paged_kv_cache"),
        )

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Cache, **options: Any) -> Result:
        """Returns (o, lse), as `run` does."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def _page_tables(
        self, names: tuple[str, str, str], page: int, *csr: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], int, list[int] | None]:
        """Returns the block table and the lengths that kernels read, how many requests there are, and the
        keys of each where they are looked at: not with CUDA graphs, unless the tables are on the host.

        names: of indptr, indices and last_page_len in messages; csr: these
        """
        indptr, indices, last_page_len = csr
        checked = GivenTensors("plan")
        for at, shape in ((2, "B"), (0, "B+1"), (1, "pages")):
            checked.check(names[at], csr[at], shape, INTEGERS, anywhere=True)
        requests = len(last_page_len)
        keys = None
        if self._capacity is None or indptr.device.type == last_page_len.device.type == "cpu":
            keys = count_keys(names, page, indptr, indices, last_page_len)
        width = max((-(-n // page) for n in keys or ()), default=0)
        if self._capacity is not None:
            width = check_room(self._capacity, names[1], requests, len(indices))
        made = make_tables(page, max(width, 1), *(table.to(self.device) for table in csr))
        return {"block_table": made[0], "kv_len": made[1]}, requests, keys

    def _kv_storage(self, page: int, width: str = "D") -> str:
        axes = f"B, N, Hkv, {width}" if self._layout == "NHD" else f"B, Hkv, N, {width}"
        return f"[{axes}] via paged(block_table, page = {page})"


def count_keys(
    names: tuple[str, str, str],
    page: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
) -> list[int]:
    """Returns the keys of each request. ValueError for tables that do not fit, by the names that they have:
    of indptr, indices and last_page_len.
    """
    starts = read_starts(names[0], indptr)
    if len(indices) < starts[-1]:
        raise ValueError(f"{names[1]}: expected at least {starts[-1]} numbers, got {len(indices)}")
    keys = []
    for (first, last), rows in zip(pairwise(starts), last_page_len.tolist(), strict=True):
        if first < last and not 1 <= rows <= page:
            raise ValueError(f"{names[2]}: expected 1 .. {page}, got {rows}")
        keys.append((last - first - 1) * page + rows if first < last else 0)
    return keys
