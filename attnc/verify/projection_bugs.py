"""Planted bugs of projections. Their stories are told in general words."""

from __future__ import annotations

from dataclasses import replace

from attnc.plan.ir_projection import ProjectionModule
from attnc.runtime.loader import load_text
from attnc.verify.planted import Bug, Catch, catch_of, plant
from attnc.verify.projection_check import fuzz_projection, projection_subject, text_of

#: `spec`: the projection of linear.attn whose first variant the bug is planted in.
PROJECTION_BUGS: tuple[Bug, ...] = (
    Bug(
        name="tail of K masked in x alone",
        spec="linear",
        story="zeros times what lies behind a row of w are zeros, unless NaN lies there",
        anchor="mask=(n[:, None] < N) & (k[None, :] < K - k_lo), other=0.0",
        patch="mask=(n[:, None] < N), other=0.0",
    ),
    Bug(
        name="last columns of K left out",
        spec="linear",
        story="the number of tiles was rounded down",
        anchor="tl.minimum(k_first + share, K), BLOCK_K, num_stages",
        patch="tl.minimum(k_first + share, K // BLOCK_K * BLOCK_K), BLOCK_K, num_stages",
    ),
    Bug(
        name="last share of K left out",
        spec="linear",
        story="shares were rounded down, so that nobody had the rest",
        anchor="k[:, None] share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K",
        patch="k[:, None]\n    share = K // BLOCK_K // SPLIT_K * BLOCK_K",
    ),
    Bug(
        name="padded rows written",
        spec="linear",
        story="M was padded to 8, and the store forgot that it was",
        anchor="exists = (m[None, :] < M) & (n[:, None] < N)",
        patch="exists = n[:, None] < N",
    ),
    Bug(
        name="y stored with the stride of x",
        spec="linear",
        story="both have M rows, and in tests both were contiguous and square",
        anchor="strides = (x.stride(0), w.stride(0), y.stride(0))",
        patch="strides = (x.stride(0), w.stride(0), x.stride(0))",
    ),
    Bug(
        name="products rounded to 16 bits",
        spec="linear",
        story="the conversion came after the multiplication",
        anchor="acc += w.to(tl.float32) * x.to(tl.float32)",
        patch="acc += (w * x).to(tl.float32)",
    ),
    Bug(
        name="shares kept in 16 bits",
        spec="linear",
        story="the workspace was allocated like the output",
        anchor="dtype=torch.float32, device=x.device",
        patch="dtype=x.dtype, device=x.device",
    ),
    Bug(
        name="first share forgotten",
        spec="linear",
        story="the loop that joins shares began where the accumulator had been initialised before",
        anchor="in tl.static_range(SPLIT_K)",
        patch="in tl.static_range(1, SPLIT_K)",
    ),
    Bug(
        name="bias lost when K is shared",
        spec="linear_bias",
        story="the kernel that joins shares was written before there was a bias",
        anchor="y += tl.load(bias_ptr + n, mask=exists, other=0.0).to(tl.float32)",
        patch="pass",
    ),
)


def hunt_projection(
    planned: ProjectionModule, bug: Bug, *, examples: int = 300, seconds: float = 60.0, seed: int = 0
) -> Catch:
    """Plants the bug in the module and fuzzes until it is caught. ValueError as for `plant`."""
    text = plant(text_of(planned), bug)
    subject = replace(projection_subject(planned), module=load_text(text))
    report = fuzz_projection(subject, examples=examples, seconds=seconds, seed=seed, shrink=False)
    return catch_of(bug, report)
