"""Random mods and calls beside torch's eager function: results, auxiliary outputs and gradients."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from attnc.flex import flex_attention
from tests.flex.oracle import dense_flex, gradients
from tests.flex.random_mods import Draw, drawn

COUNT = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 12


def check(draw: Draw, within: float = 1e-4) -> None:
    """Within so much of the largest element: by default, some roundings of float32."""
    leaves = (draw.q, draw.k, draw.v, *draw.learned)
    o, aux = flex_attention(
        draw.q, draw.k, draw.v, draw.score_mod, draw.block_mask, mask_mod=draw.mask_mod,
        return_aux=AuxRequest(lse=True, max_scores=True), **draw.options,
    )  # fmt: skip
    expected, lse, largest = dense_flex(
        draw.q, draw.k, draw.v, draw.score_mod, draw.oracle_mask, learned=bool(draw.learned), **draw.options
    )
    close("o", o, expected, within)
    close("lse", aux.lse, lse, within)
    close("max_scores", aux.max_scores, largest, within)
    found, right = gradients(o, leaves), gradients(expected, leaves, like=o)
    for name, ours, exact in zip(("dq", "dk", "dv", *map(str, range(9))), found, right, strict=False):
        assert ours is not None
        close(name, ours, torch.zeros_like(ours) if exact is None else exact, 10 * within)


def close(name: str, found: torch.Tensor, exact: torch.Tensor, within: float) -> None:
    found, exact = found.detach(), exact.detach().double()
    torch.testing.assert_close(
        found.double(),
        exact,
        rtol=within,
        atol=within * max(_largest(exact), 0.1),
        msg=lambda text: f"{name}: {text}",
    )


def _largest(x: torch.Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


@pytest.mark.one_in(12)
@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_mods_compute_what_torch_computes(seed: int) -> None:
    draw = drawn(seed)
    print(draw)
    check(draw)
