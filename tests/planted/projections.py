"""Bugs planted in projections. Their stories are told in general words."""

from __future__ import annotations

from tests.planted.bug import ProjectionBug

BUGS: tuple[ProjectionBug, ...] = (
    ProjectionBug(
        name="tail of K masked in x alone",
        attention="linear",
        story="zeros times what lies behind a row of w are zeros, unless NaN lies there",
        anchor="mask=(n[:, None] < N) & (k[None, :] < K - k_lo), other=0.0",
        patch="mask=(n[:, None] < N), other=0.0",
    ),
    ProjectionBug(
        name="last columns of K left out",
        attention="linear",
        story="the number of tiles was rounded down",
        anchor="tl.minimum(k_first + split_size, K), BLOCK_K, num_stages",
        patch="tl.minimum(k_first + split_size, K // BLOCK_K * BLOCK_K), BLOCK_K, num_stages",
    ),
    ProjectionBug(
        name="last split of K left out",
        attention="linear",
        story="splits were rounded down, so that nobody had the rest",
        anchor="k[:, None] split_size = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K",
        patch="k[:, None]\n    split_size = K // BLOCK_K // SPLIT_K * BLOCK_K",
    ),
    ProjectionBug(
        name="padded rows written",
        attention="linear",
        story="M was padded to 8, and the store forgot that it was",
        anchor="exists = (m[None, :] < M) & (n[:, None] < N)",
        patch="exists = n[:, None] < N",
    ),
    ProjectionBug(
        name="y stored with the stride of x",
        attention="linear",
        story="both have M rows, and in tests both were contiguous and square",
        anchor="strides = (x.stride(0), w.stride(0), y.stride(0))",
        patch="strides = (x.stride(0), w.stride(0), x.stride(0))",
    ),
    ProjectionBug(
        name="products rounded to 16 bits",
        attention="linear",
        story="the conversion came after the multiplication",
        anchor="acc += w.to(tl.float32) * x.to(tl.float32)",
        patch="acc += (w * x).to(tl.float32)",
    ),
    ProjectionBug(
        name="splits kept in 16 bits",
        attention="linear",
        story="the workspace was allocated like the output",
        anchor="dtype=torch.float32, device=x.device",
        patch="dtype=x.dtype, device=x.device",
    ),
    ProjectionBug(
        name="first split forgotten",
        attention="linear",
        story="the loop that joins splits began where the accumulator had been initialised before",
        anchor="in tl.static_range(SPLIT_K)",
        patch="in tl.static_range(1, SPLIT_K)",
    ),
    ProjectionBug(
        name="bias lost when K is shared",
        attention="linear_bias",
        story="the kernel that joins splits was written before there was a bias",
        anchor="y += tl.load(bias_ptr + n, mask=exists, other=0.0).to(tl.float32)",
        patch="pass",
    ),
)
