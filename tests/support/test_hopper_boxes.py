"""What TMA copies of a tensor, and what of it has to be copied before."""

from __future__ import annotations

import pytest
import torch

from attnc.support.arguments import Tensor
from attnc.support.hopper_call import Box, box_of, copied, padded
from attnc.support.memory import memory_of

BF16 = torch.bfloat16


def box(x: torch.Tensor, type: str = "bf16[H, M, N]", axes: str = "") -> Box:
    return box_of(Tensor("x", type, axes), memory_of(x), 128)


def test_a_tensor_with_features_has_its_axes_by_their_letters() -> None:
    x = torch.empty(2, 5, 3, 64, dtype=BF16)
    assert box(x, "bf16[B, N, H, 64]", "bnh") == Box(BF16, (64, 5, 3, 2), (384, 128, 1920), 128)


@pytest.mark.parametrize(
    ("x", "sizes", "strides"),
    [
        (torch.empty(3, 5, 8, dtype=BF16), (8, 5, 3, 1), (16, 80, 16)),
        (torch.empty(5, 8), (8, 5, 1, 1), (32, 16, 16)),
        (torch.empty(2, 3, 5, 8, dtype=BF16), (8, 5, 3, 2), (16, 80, 240)),
        (torch.empty(1, 5, 8, dtype=BF16).expand(3, -1, -1), (8, 5, 3, 1), (16, 0, 16)),
    ],
)
def test_one_of_queries_and_keys_has_those_of_its_index(
    x: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    found = box(x)
    assert (found.sizes, found.strides) == (sizes, strides)
    assert found.is_taken


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(3, 5, 7, dtype=BF16),  # rows of 14 bytes
        torch.empty(3, 8, 8, dtype=BF16).transpose(1, 2),  # columns one row apart
        torch.empty(3, 5, 16, dtype=BF16)[..., ::2],
    ],
)
def test_what_tma_does_not_take_it_takes_as_a_copy(x: torch.Tensor) -> None:
    x = x.copy_(torch.arange(x.numel()).view(x.shape))
    assert not box(x).is_taken
    copy = copied(x)
    assert torch.equal(copy, x)
    assert memory_of(copy) == padded(x.shape, x.dtype)
    assert box(copy).is_taken


def test_a_tensor_without_columns_has_rows_all_the_same() -> None:
    x = torch.empty(3, 5, 0, dtype=BF16)
    assert box(copied(x)).is_taken
