"""Pages copied to rows, and gradients of rows summed by page: a Triton kernel each."""

import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .memory import Memory
from .pages import PageAxes, Rows, Sum
from .sizes import cdiv, next_power_of_2
from .triton_launch import TritonLaunch

#: Elements that a program copies, and sums, at most; its warps.
_COPIED, _SUMMED, _WARPS = 4096, 2048, 4
#: Entries, and entries that all programs look at together, above which these are sorted before they are
#: summed, which takes three launches and more. Entries that a program looks at in a step.
_FEW, _MOST_SEEN, _STEP = 4096, 1 << 26, 1024


@cache
def builds_launchers() -> bool:
    """Returns whether Triton can build what launches its kernels, which takes a C compiler."""
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, subprocess.SubprocessError):
        return False
    return True


class TritonPages:
    """`pages.PageKernels`."""

    def gather(
        self, pages: Sequence[PageAxes], table: Memory, keys: Memory, page: int, device: torch.device
    ) -> Callable[[Rows], None]:
        batch, columns = table.shape
        numbers = [columns, *table.steps, *keys.steps, pages[0].number, *_strides(pages)]
        block, chunks = _cut(pages, page, _COPIED)
        grid = (batch * columns, chunks, len(pages))
        launch = _prepare(gather_pages, 8, grid, numbers, {**_sizes(pages, page), "BLOCK": block}, device)
        return launch.run

    def reads(self, pages: torch.Tensor) -> bool:
        if pages.dtype != torch.float8_e4m3fn or not pages.is_cuda:
            return True
        return torch.cuda.get_device_capability(pages.device) >= (8, 9)

    def sum(self, pages: Sequence[PageAxes], table: tuple[int, int], page: int, device: torch.device) -> Sum:
        batch, columns = table
        entries = batch * columns
        count, (block, chunks) = pages[0].number, _cut(pages, page, _SUMMED)
        sorts = entries > _FEW or count * chunks * len(pages) * entries > _MOST_SEEN
        constants = {**_sizes(pages, page), "BLOCK": block, "STEP": _STEP, "SORTED": sorts}
        grid = (entries if sorts else count, chunks, len(pages))
        launch = _prepare(sum_pages, 7, grid, [entries, columns, count, *_strides(pages)], constants, device)

        def run(rows: Rows, numbers: torch.Tensor, keys: torch.Tensor, made: Rows) -> None:
            order = numbers
            if sorts:
                torch._foreach_zero_(list(made))
                numbers, order = torch.sort(numbers.view(-1), stable=True)
            launch.run([rows[0], rows[-1], numbers, order, keys, made[0], made[-1]])

        return run


def _strides(pages: Sequence[PageAxes]) -> list[int]:
    return [*pages[0].strides, *pages[-1].strides]


def _cut(pages: Sequence[PageAxes], page: int, most: int) -> tuple[int, int]:
    """Returns how many elements of a page a program has, and into how many chunks the largest page is cut."""
    size = max(page * one.heads * one.width for one in pages)
    block = min(next_power_of_2(size), most)
    return block, cdiv(size, block)


def _sizes(pages: Sequence[PageAxes], page: int) -> dict[str, object]:
    k, v = pages[0], pages[-1]
    own = {"K_HEADS": k.heads, "K_WIDTH": k.width, "V_HEADS": v.heads, "V_WIDTH": v.width}
    return {"PAGE": page, **own}


def _prepare(
    kernel: Any,
    tensors: int,
    grid: tuple[int, ...],
    numbers: Sequence[int],
    constants: dict[str, object],
    device: torch.device,
) -> TritonLaunch:
    options = {"num_warps": _WARPS}
    return TritonLaunch(kernel, grid, range(tensors), numbers, constants, device, None, options)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _at(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    i, stride_n, stride_h, stride_d, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Where elements of a page lie behind its first one; rows have them one behind the other."""
    n, h, d = i // (HEADS * WIDTH), i // WIDTH % HEADS, i % WIDTH
    return n.to(tl.int64) * stride_n + h.to(tl.int64) * stride_h + d.to(tl.int64) * stride_d


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _copy_chunk(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    x_ptrs, rows_ptr, entry, is_named, i, SIZE: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptrs, mask=(i < SIZE) & is_named, other=0.0)
    tl.store(rows_ptr + entry.to(tl.int64) * SIZE + i, x.to(rows_ptr.dtype.element_ty), mask=i < SIZE)


@triton.jit(do_not_specialize=["columns", "count"])  # type: ignore[untyped-decorator]  # as above
def gather_pages(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    k_ptr, v_ptr, table_ptr, lens_ptr, k_rows_ptr, v_rows_ptr, numbers_ptr, keys_ptr,
    columns, stride_table_b, stride_table_p, stride_lens, count,
    stride_kp, stride_kn, stride_kh, stride_kd, stride_vp, stride_vn, stride_vh, stride_vd,
    PAGE: tl.constexpr, K_HEADS: tl.constexpr, K_WIDTH: tl.constexpr, V_HEADS: tl.constexpr,
    V_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each entry of the table, each chunk of a page, and each of k and v."""
    entry, chunk = tl.program_id(0), tl.program_id(1)
    b, column = entry // columns, entry % columns
    keys = tl.load(lens_ptr + b.to(tl.int64) * stride_lens)
    number = tl.load(table_ptr + b.to(tl.int64) * stride_table_b + column.to(tl.int64) * stride_table_p)
    is_read = column * PAGE < keys
    is_named = is_read & (number >= 0) & (number < count)
    if (chunk == 0) & (tl.program_id(2) == 0):
        tl.store(numbers_ptr + entry, tl.where(is_named, number, count).to(tl.int32))
        if column == 0:
            tl.store(keys_ptr + b, tl.minimum(tl.maximum(keys, 0), columns * PAGE).to(tl.int32))
    if is_read:  # rows of an entry that names no page become zeros
        page = tl.where(is_named, number, 0).to(tl.int64)
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        if tl.program_id(2) == 0:
            at = page * stride_kp + _at(i, stride_kn, stride_kh, stride_kd, K_HEADS, K_WIDTH)
            _copy_chunk(k_ptr + at, k_rows_ptr, entry, is_named, i, PAGE * K_HEADS * K_WIDTH)
        else:
            at = page * stride_vp + _at(i, stride_vn, stride_vh, stride_vd, V_HEADS, V_WIDTH)
            _copy_chunk(v_ptr + at, v_rows_ptr, entry, is_named, i, PAGE * V_HEADS * V_WIDTH)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _find_entry(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    numbers_ptr, page, after, entries, STEP: tl.constexpr,
):  # fmt: skip
    """The first entry behind another one that names a page; the number of entries where none does."""
    found, start = entries, (after + 1) // STEP * STEP
    while (found == entries) & (start < entries):
        at = start + tl.arange(0, STEP)
        number = tl.load(numbers_ptr + at, mask=at < entries, other=-1)
        found = tl.min(tl.where((number == page) & (at > after), at, entries), 0)
        start += STEP
    return found


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _load_chunk(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    rows_ptr, keys_ptr, entry, columns, i, PAGE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Elements of an entry's page of rows, of which those of keys count."""
    keys = tl.load(keys_ptr + entry // columns) - entry % columns * PAGE
    return tl.load(
        rows_ptr + entry.to(tl.int64) * (PAGE * ROW) + i, mask=i < tl.minimum(keys, PAGE) * ROW, other=0.0
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _sum_chunk(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    rows_ptr, numbers_ptr, order_ptr, keys_ptr, page, place, i, entries, columns,
    PAGE: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """The sum of all rows of a page, in the order of the table. place: where its entries begin in what is
    sorted.
    """
    total = tl.zeros(i.shape, tl.float32)
    if SORTED:
        found = page
        while found == page:
            total += _load_chunk(rows_ptr, keys_ptr, tl.load(order_ptr + place), columns, i, PAGE, ROW)
            place += 1
            found = tl.load(numbers_ptr + place, mask=place < entries, other=-1)
    else:
        entry = _find_entry(numbers_ptr, page, -1, entries, STEP)
        while entry < entries:
            total += _load_chunk(rows_ptr, keys_ptr, entry, columns, i, PAGE, ROW)
            entry = _find_entry(numbers_ptr, page, entry, entries, STEP)
    return total


@triton.jit(  # type: ignore[untyped-decorator]  # as above
    do_not_specialize=["entries", "columns", "count"]
)
def sum_pages(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    k_rows_ptr, v_rows_ptr, numbers_ptr, order_ptr, keys_ptr, k_ptr, v_ptr,
    entries, columns, count,
    stride_kp, stride_kn, stride_kh, stride_kd, stride_vp, stride_vn, stride_vh, stride_vd,
    PAGE: tl.constexpr, K_HEADS: tl.constexpr, K_WIDTH: tl.constexpr, V_HEADS: tl.constexpr,
    V_WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """A program for each page, each chunk of it, and each of k and v. SORTED: for each entry in the order of
    pages, of which the first of a page sums all; pages that none names are zeros then.
    """
    place = tl.program_id(0)
    page, is_first = place, place >= 0
    if SORTED:
        page = tl.load(numbers_ptr + place)
        before = tl.load(numbers_ptr + place - 1, mask=place > 0, other=-1)
        is_first = (page < count) & (page != before)
    if is_first:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if tl.program_id(2) == 0:
            total = _sum_chunk(
                k_rows_ptr, numbers_ptr, order_ptr, keys_ptr, page, place, i, entries, columns,
                PAGE, K_HEADS * K_WIDTH, STEP, SORTED,
            )  # fmt: skip
            at = page.to(tl.int64) * stride_kp + _at(i, stride_kn, stride_kh, stride_kd, K_HEADS, K_WIDTH)
            tl.store(k_ptr + at, total.to(k_ptr.dtype.element_ty), mask=i < PAGE * K_HEADS * K_WIDTH)
        else:
            total = _sum_chunk(
                v_rows_ptr, numbers_ptr, order_ptr, keys_ptr, page, place, i, entries, columns,
                PAGE, V_HEADS * V_WIDTH, STEP, SORTED,
            )  # fmt: skip
            at = page.to(tl.int64) * stride_vp + _at(i, stride_vn, stride_vh, stride_vd, V_HEADS, V_WIDTH)
            tl.store(v_ptr + at, total.to(v_ptr.dtype.element_ty), mask=i < PAGE * V_HEADS * V_WIDTH)
