"""Products with strides have 64 bits: in every committed kernel, and what is found where one has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.verify.offsets import narrow_products

FOLDERS = sorted((Path(__file__).parents[2] / "generated").glob("*/triton"))
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
