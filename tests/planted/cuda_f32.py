"""Bugs planted where CUDA kernels multiply f32, in parts of 11 bits."""

from __future__ import annotations

from tests.planted.bug import CudaBug

BUGS: tuple[CudaBug, ...] = (
    CudaBug(
        name="the small part of the left operand dropped",
        attention="single",
        story="two products of three were written for tf32x3",
        anchor="mma_sync(small, a.small, b.large[2 * half], b.large[2 * half + 1]);",
        patch="",
    ),
    CudaBug(
        name="the small part of the right operand dropped",
        attention="single",
        story="only what is rounded in registers was thought to be rounded",
        anchor="mma_sync(small, a.large, b.small[2 * half], b.small[2 * half + 1]);",
        patch="",
    ),
    CudaBug(
        name="a small part of the whole operand",
        attention="single",
        story="the remainder was taken from what the tensor core was given, not from what it reads",
        anchor="x.large[i] = __float_as_uint(upwards(value)) & 0xffffe000u;",
        patch="x.large[i] = __float_as_uint(upwards(value));",
    ),
    CudaBug(
        name="corrections of infinities",
        attention="single",
        story="inf - inf is the small part of an infinite value, and its NaN was added",
        anchor="return fabsf(small) < INF ? small : 0.0f;",
        patch="return small;",
    ),
    CudaBug(
        name="keys of V in the order of memory",
        attention="single",
        story="P has keys 2t and 2t + 1 where the instruction wants t and t + 4, and V was not read so",
        anchor="first = address(right + at<WIDTH>(row + lane % 4 * 2, lane / 16) + lane / 4 % 4);",
        patch="first = address(right + at<WIDTH>(row + lane % 4, lane / 16) + lane / 4 % 4);",
    ),
    CudaBug(
        name="P in the order of its registers",
        attention="single",
        story="an accumulator was given to the next product as it was",
        anchor="split(x, i, fragment[i % 2 * 2 + i / 2]);",
        patch="split(x, i, fragment[i]);",
    ),
    CudaBug(
        name="the next row where the last one lies",
        attention="single",
        story="neighbouring rows have their chunks in another order",
        anchor="PERIOD<WIDTH> == 8 ? place ^ 16 : place",
        patch="place",
    ),
    # Gradients
    CudaBug(
        name="the small part of ds dropped",
        attention="single",
        story="ds was rounded as for 16-bit operands",
        anchor="mma_sync(small, a.small, b.large[2 * half], b.large[2 * half + 1]);",
        patch="",
        file="backward_dq",
    ),
    CudaBug(
        name="corrections of scores not added",
        attention="single",
        story="the small products were summed, and forgotten",
        anchor="products[i][j][e] += correction(small[i][j][e]); } // Accumulator pieces",
        patch="products[i][j][e] += 0.0f; } // Accumulator pieces",
        file="backward_dkdv",
    ),
    CudaBug(
        name="queries in the order of memory",
        attention="single",
        story="p^T has queries 2t and 2t + 1 where the instruction wants t and t + 4, and do was not read so",
        anchor="first = address(right + at<WIDTH>(row + lane % 4 * 2, lane / 16) + lane / 4 % 4);",
        patch="first = address(right + at<WIDTH>(row + lane % 4, lane / 16) + lane / 4 % 4);",
        file="backward_dkdv",
    ),
    CudaBug(
        name="sums of a tile replaced by the last",
        attention="single",
        story="each tile is summed by itself, and the sums were assigned",
        anchor="sums[i][2 * j + e / 4][e % 4] += sum[i][e / 4][e % 4]",
        patch="sums[i][2 * j + e / 4][e % 4] = sum[i][e / 4][e % 4]",
        file="backward_dq",
    ),
    CudaBug(
        name="half of a chunk of delta",
        attention="single",
        story="four elements are 16 bytes, and eight threads were thought to read 64",
        anchor="i += 32)",
        patch="i += 64)",
        file="backward_preprocess",
    ),
)
