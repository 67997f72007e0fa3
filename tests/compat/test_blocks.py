"""flash-attention 4's lists of blocks: the same as a mask of their blocks in float64, gradients included."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from attnc.compat.blocks import list_of_blocks
from attnc.compat.flash_attn import flash_attn_func


class Lists(NamedTuple):
    """Fields of flash-attention's `BlockSparseTensorsTorch`."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    block_size: tuple[int, int] | None = None


M, N, SIZE = 40, 75, (16, 32)


def draw(*outer: int, seed: int, blocks: tuple[int, int] = (3, 3)) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns counts and indices: of each row some blocks in any order, then what must not be read."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = blocks
    order = torch.rand(*outer, rows, keys, generator=generator).argsort(-1).int()
    return torch.randint(0, keys + 1, (*outer, rows), generator=generator, dtype=torch.int32), order


def mask_of(lists: Lists, heads: int) -> torch.Tensor:
    """Returns bool[B, H, M, N] of the blocks that are listed."""
    found = torch.zeros(2, heads, 3, 3, dtype=torch.bool)
    for counts, indices in ((lists[0], lists[1]), (lists[2], lists[3])):
        if counts is not None:
            counted = torch.arange(3) < counts[..., None]
            for block in range(3):
                found[..., block] |= (counted & (indices == block)).any(-1).expand(2, heads, 3)
    return found.repeat_interleave(16, 2)[:, :, :M].repeat_interleave(32, 3)[..., :N]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, causal: bool
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    if causal:
        mask = mask & (torch.arange(N) <= torch.arange(M)[:, None] + N - M)
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("bhmn,bnhd->bmhd", weights, v)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("outer", [(2, 4), (1, 1), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_no_listed_block_are_hidden(outer: tuple[int, int], causal: bool) -> None:
    q = torch.randn(2, M, 4, 32, dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(2, N, 2, 32, dtype=torch.float16, requires_grad=True) for _ in range(2))
    lists = Lists(*draw(*outer, seed=1), *draw(1, 1, seed=2), SIZE)
    o, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True, block_sparse_tensors=lists)
    do = torch.randn_like(o)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attend(exact[0], exact[1], exact[2], mask_of(lists, 4), causal=causal)
    torch.autograd.backward(expected, do.double())
    o.backward(do)
    torch.testing.assert_close(o.double(), expected, atol=5e-3, rtol=5e-3)
    for x, y in zip((q, k, v), exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, atol=2e-2, rtol=2e-2)
    assert lse.shape == (2, 4, M)


def test_a_call_with_lists_is_no_repeat_of_one_without() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 32, dtype=torch.float16)
    none = Lists(torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    for _ in range(6):
        assert flash_attn_func(q, k, v).any()
        assert not flash_attn_func(q, k, v, block_sparse_tensors=none).any()


def test_entries_behind_the_count_say_nothing() -> None:
    counts, indices = torch.tensor([[[1, 0, 2]]]), torch.tensor([[[[2, 1], [0, 1], [1, 0]]]])
    q, k = torch.empty(1, 300, 2, 32), torch.empty(1, 300, 2, 32)
    found, size = list_of_blocks("f", Lists(counts, indices), q, k)
    assert found.tolist() == [[[[2, -1], [-1, -1], [1, 0]]]]
    assert size == (128, 128)


WRONG_SIZES: list[Any] = [
    (16, 20), (16,), (16, 16, 16), (), 16, {16: 16, 32: 32}, (16, 0), (8, 16), (True, 16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (Lists(None, None), "expected mask_block_cnt and mask_block_idx"),
        (Lists(draw(1, 1, seed=0)[0], None, block_size=SIZE), "expected both or none"),
        (
            Lists(*draw(3, 1, seed=0), None, None, SIZE),
            r"mask_block_cnt: expected shape \[2 or 1, 4 or 1, 3\]",
        ),
        *(
            (Lists(*draw(1, 1, seed=0), None, None, size), "block_size: expected two multiples of 16")
            for size in WRONG_SIZES
        ),
        (Lists(*draw(1, 1, seed=0)), r"expected shape \[2 or 1, 4 or 1, 1\]"),
        (
            Lists(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3, 3), block_size=SIZE),
            "expected a tensor of integers",
        ),
    ],
)
def test_wrong_lists_are_named(lists: Lists, message: str) -> None:
    q, k = torch.randn(2, M, 4, 32, dtype=torch.float16), torch.randn(2, N, 2, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match=message):
        flash_attn_func(q, k, k, block_sparse_tensors=lists)


@pytest.mark.parametrize("name", ["mask_mod", "score_mod", "gather_kv_indices"])
def test_functions_of_another_compiler_are_refused(name: str) -> None:
    q = torch.randn(1, 20, 2, 32, dtype=torch.float16)
    options: dict[str, Any] = {name: lambda *_: True}
    with pytest.raises(ValueError, match=name):
        flash_attn_func(q, q, q, **options)
