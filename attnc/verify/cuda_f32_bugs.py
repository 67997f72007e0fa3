"""Bugs planted where CUDA kernels multiply f32, in parts of 11 bits."""

from __future__ import annotations

from attnc.verify.planted import Bug

CUDA_F32_BUGS: tuple[Bug, ...] = (
    Bug(
        name="the small part of the left operand dropped",
        spec="single",
        story="two products of three were written for tf32x3",
        anchor="multiply_add(small, a.small, b.large[2 * half], b.large[2 * half + 1]);",
        patch="",
    ),
    Bug(
        name="the small part of the right operand dropped",
        spec="single",
        story="only what is rounded in registers was thought to be rounded",
        anchor="multiply_add(small, a.large, b.small[2 * half], b.small[2 * half + 1]);",
        patch="",
    ),
    Bug(
        name="a small part of the whole operand",
        spec="single",
        story="the remainder was taken from what the tensor core was given, not from what it reads",
        anchor="x.large[i] = __float_as_uint(upwards(value)) & 0xffffe000u;",
        patch="x.large[i] = __float_as_uint(upwards(value));",
    ),
    Bug(
        name="corrections of infinities",
        spec="single",
        story="inf - inf is the small part of an infinite value, and its NaN was added",
        anchor="return fabsf(small) < INF ? small : 0.0f;",
        patch="return small;",
    ),
    Bug(
        name="keys of V in the order of memory",
        spec="single",
        story="P has keys 2t and 2t + 1 where the instruction wants t and t + 4, and V was not read so",
        anchor="v_first = address(v_tile + at(key + lane % 4 * 2, lane / 16) + lane / 4 % 4);",
        patch="v_first = address(v_tile + at(key + lane % 4, lane / 16) + lane / 4 % 4);",
    ),
    Bug(
        name="P in the order of its registers",
        spec="single",
        story="an accumulator was given to the next product as it was",
        anchor="split(x, i, piece[i % 2 * 2 + i / 2]);",
        patch="split(x, i, piece[i]);",
    ),
    Bug(
        name="the next row where the last one lies",
        spec="single",
        story="neighbouring rows have their chunks in another order",
        anchor="return (place ^ 16) + D * sizeof(element);",
        patch="return place + D * sizeof(element);",
    ),
)
