"""What a tape means for all pairs: beside lists of blocks, and of elements that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.flex.blocks import Blocks, restrict
from tests.flex.meaning import products, tape_values, trace_at


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_a_list_are_those_that_it_names(seed: int) -> None:
    """Of lists that say more than the mask, and of full blocks beside them."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = ((16, 16), (32, 16), (8, 16), (16, 48))[seed]
    B, H, M, N = 2, 3, 40, 70
    R, C = -(-M // rows), -(-N // columns)
    outer = ((1, 1), (2, 1), (1, 3), (2, 3))[seed]
    partial, full = (torch.rand((*outer, R, C), generator=generator) < 0.5 for _ in range(2))

    def lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table.sum(-1).int(), torch.argsort(table.int(), dim=-1, descending=True, stable=True).int()

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    product = products(B, H, M, N)
    listed, others = lists(partial), lists(full)
    for has_full in (False, True):
        counts, indices = others if has_full else (None, None)
        blocks = Blocks(*listed, counts, indices, rows, columns)
        traced = restrict(trace_at(None, causal, product), blocks)
        found = tape_values(traced, product)
        q, kv = torch.arange(M), torch.arange(N)
        of_pair = (slice(None), slice(None), (q // rows)[:, None], (kv // columns)[None])
        expected = partial[of_pair] & (q[:, None] >= kv)
        if has_full:
            expected = expected | full[of_pair]
        mask = found[traced.mask] if traced.listed is None else found[traced.mask] & found[traced.listed]
        assert torch.equal(mask.expand(B, H, M, N), expected.expand(B, H, M, N))


def test_what_lies_beyond_a_tensor_is_0() -> None:
    """As kernels read it: where the caller's mask leaves such keys out."""
    table = torch.arange(1.0, 7).view(2, 3)
    product = products(1, 2, 4, 6)
    for shift in (0, 1, 2, 9):

        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any, shift: int = shift) -> Any:
            return table[h, kv + shift]

        traced = trace_at(mod, None, product)
        expected = torch.nn.functional.pad(table, (0, 20))[:, shift : shift + 6]
        found = tape_values(traced, product)[traced.score]
        assert torch.equal(found.expand(1, 2, 4, 6), expected[None, :, None].expand(1, 2, 4, 6))
