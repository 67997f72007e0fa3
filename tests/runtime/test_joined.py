"""Results of several ranks joined by one kernel: what merging them one after the other gives."""

import math

import pytest
import torch

from attnc.runtime.merge import merge_states
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

from attnc.runtime.merge import joined  # noqa: E402  # once Triton interprets


@pytest.mark.parametrize(("ranks", "width"), [(1, 16), (2, 20), (5, 7)])
def test_joining_is_merging_one_after_the_other(ranks: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    every = torch.randn(ranks, 3, 2, width + 4, generator=generator)
    every[..., width] *= 40
    every[-1, 0, 0, width] = -math.inf  # a rank without a key, of which nothing is looked at
    every[-1, 0, 0, :width] = math.nan
    o, lse = every[0, ..., :width], every[0, ..., width]
    for other in every[1:]:
        o, lse = merge_states(o, lse, other[..., :width], other[..., width])
    found, found_lse = joined(every, width, torch.float32)
    if ranks > 1:
        torch.testing.assert_close(found, o, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found_lse, lse)
    assert joined(every, width, torch.bfloat16)[0].dtype is torch.bfloat16


def test_rows_without_keys_are_empty() -> None:
    every = torch.full((3, 2, 12), math.nan)
    every[..., 8] = -math.inf
    o, lse = joined(every, 8, torch.float32)
    assert o.tolist() == [[0.0] * 8] * 2
    assert lse.tolist() == [-math.inf] * 2
    assert joined(every[:, :0], 8, torch.float32)[0].shape == (0, 8)
