"""Offsets have 64 bits: in every committed kernel, and what is found where one has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.target.support import with_headers
from attnc.verify.cuda_offsets import narrow_offsets
from attnc.verify.offsets import narrow_products
from tests.by_day import some_by_day

GENERATED = Path(__file__).parents[2] / "generated"
FOLDERS, CUDA_FOLDERS = (sorted(GENERATED.glob(pattern)) for pattern in ("*/triton", "*/cuda_sm_*"))
KERNEL = """
import triton


def host(i, stride_qm):
    return i * stride_qm


@triton.jit
def _find(table, stride, row):
    page = tl.load(table + tl.cast(row, tl.int64) * stride)
    return page.to(tl.int64)


@triton.jit
def _load(x, page, row, stride_page, stride):
    return tl.load(x + page * stride_page + row.to(tl.int64)[:, None] * stride)


@triton.jit
def kernel(Q, table, b, h, H, stride_qb, stride_qh, stride_kp, stride_kn, M_padded):
    first_head = 0 * stride_qh + 1 * stride_qb
    Q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    row = b * H + h
    first = row.to(tl.int64) * M_padded
    page = _find(table, stride_kn, row)
    k = _load(K, page, row, stride_kp, stride_kn)
"""


def test_kernels_multiply_strides_in_64_bits() -> None:
    assert narrow_products(KERNEL) == ()
    for folder in FOLDERS:
        path = max(folder.glob("*.py"))  # those of a spec differ in sizes
        assert narrow_products(path.read_text(encoding="utf-8")) == (), path


@pytest.mark.parametrize(
    ("old", "new", "product"),
    [
        ("b.to(tl.int64) * stride_qb", "b * stride_qb", "b * stride_qb"),
        ("row.to(tl.int64) * M_padded", "row * M_padded", "row * M_padded"),
        ("row.to(tl.int64)[:, None] * stride", "row[:, None] * stride", "row[:, None] * stride"),
        ("tl.cast(row, tl.int64)", "row", "row * stride"),
        ("return page.to(tl.int64)", "return page", "page * stride_page"),
        ("page = _find(table, stride_kn, row)", "page = row", "page * stride_page"),
        (
            "b.to(tl.int64) * stride_qb",
            "tl.load(b.to(tl.int64)) * stride_qb",
            "tl.load(b.to(tl.int64)) * stride_qb",
        ),
    ],
)
def test_a_product_in_32_bits_is_found(old: str, new: str, product: str) -> None:
    assert old in KERNEL
    assert narrow_products(KERNEL.replace(old, new)) == (product,)


CUDA = """
#define D 64
struct Args {
    const element* q_ptr;
    long long stride_qb, stride_qh, o_size;
    int B, H, M, N, M_padded, SPLITS, list_blocks;
};

template <int COUNT>
__device__ void copy_rows(element* to, const element* from, long long stride, int first)
{
    const int row = threadIdx.x / (D / 8), column = threadIdx.x % (D / 8) * 8;
    for (int i = 0; i < COUNT; ++i)
        *(Four*)(to + row * D + column) = *(const Four*)(from + (first + row) * stride + 8 * i);
}

extern "C" __global__ void kernel(const Args args)
{
    const int M = args.M, b = blockIdx.x / args.H, h = blockIdx.x % args.H, q_idx = threadIdx.x;
    const element* const Q = args.q_ptr + b * args.stride_qb + h * args.stride_qh;
    const long long first_row = (long long)(b * args.H + h) * args.M_padded;
    const long long packed_row = (long long)h * args.M_padded + q_idx;
    const float mu = args.mu_ptr[h], farness = (q_idx - kv_idx - mu * 10) * (q_idx - kv_idx - mu * 10);
    float* const to = args.o_ptr + (((long long)(b * args.H + h) * M + q_idx) * args.SPLITS + 2) * D;
    const int line = ((long long)b * args.H + h) * args.list_blocks + q_idx / 128;
    for (long long i = threadIdx.x; i < (long long)M * D / 2; i += 32)
        to[(long long)blockIdx.x * args.SPLITS + i] = min<long long>(args.N, first_row) * 2 * 3 * 4;
    for (long long place = threadIdx.x; place < args.o_size; place += 32) {
        const long long row = place / D, column = place % D;
        to[row * args.list_blocks * D + column] = 0.0f;
    }
    ((Four*)to)[blockIdx.x * (TILE_SIZE / 4ll) + q_idx] = Four{};
    const int* const list = args.lists_ptr + max(line, 0) * (long long)(args.SPLITS + 1);
    const Pair* const sums = (const Pair*)args.sums_ptr + (long long)blockIdx.x * args.B;
    for (int r = 0; r < 2; ++r)
        to[(long long)q_idx[r] * args.N + list[r]] = sums[r].x;
}
"""


def test_cuda_offsets_are_counted_in_64_bits() -> None:
    assert narrow_offsets(CUDA) == ()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("folder", some_by_day(CUDA_FOLDERS, of=9))
def test_cuda_kernels_count_offsets_in_64_bits(folder: Path) -> None:
    for path in sorted(folder.glob("*.cu"))[:3]:  # those of a spec differ in sizes
        assert narrow_offsets(with_headers(path.read_text(encoding="utf-8"))) == (), path


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("= (long long)(b", "= (int)(b", "(int)(b * args.H + h) * args.M_padded"),
        ("const float mu", "const int mu", "(q_idx - kv_idx - mu * 10) * (q_idx - kv_idx"),
        ("(long long)h *", "(int)h *", "(int) h * args.M_padded"),
        ("const long long first_row", "const int first_row", "const int first_row = (long long)(b *"),
        ("(((long long)(b", "(((b", "(((b"),
        ("(long long)blockIdx.x * args.S", "(int)blockIdx.x * args.S", "(int) blockIdx.x * args.SPLITS"),
        ("for (long long i", "for (int i", "for(int i = threadIdx.x;"),
        ("i < (long long)M * D", "i < M * D", "M * D"),
        ("const long long row = place", "const int row = place", "const int row = place / D"),
        ("TILE_SIZE / 4ll", "TILE_SIZE / 4", "blockIdx.x * (TILE_SIZE / 4)"),
        ("(long long)(args.SPLITS", "(args.SPLITS", "max(line, 0) * (args.SPLITS + 1)"),
        ("(long long)blockIdx.x * args.B", "blockIdx.x * args.B", "blockIdx.x * args.B"),
        ("(long long)q_idx[r]", "q_idx[r]", "q_idx[r] * args.N"),
    ],
)
def test_a_narrow_offset_is_found(old: str, new: str, line: str) -> None:
    assert CUDA.count(old) == 1
    assert [found for found in narrow_offsets(CUDA.replace(old, new)) if found.startswith(line)]
