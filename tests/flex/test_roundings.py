"""The bound for gradients of learned tensors: roundings are within it, and a part that is missing is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.flex.roundings import Dense, allowed

S, D, TILE = 64, 16, 16


class Setting:
    """q, k, v, do of a type, and learned tensors whose gradients cancel more or less."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.q, self.k, self.v, self.do = (made(2, 2, S, D).to(dtype) for _ in range(4))
        self.shift = made().requires_grad_()  # of all scores alike: its gradient is 0, of terms that are not
        self.slope = made(2).requires_grad_()  # of each head
        self.bias = made(S).requires_grad_()  # of each key
        self.heat = made(1).requires_grad_()
        self.leaves = (self.shift, self.slope, self.bias, self.heat)

    def score(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * self.heat[0] + self.shift + self.slope[h] * (kv - q) / S + self.bias[kv]

    @staticmethod
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def gradients(self, dtype: torch.dtype | None, tile: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """As a kernel makes them: float32, o and p in `dtype` (None: float64 throughout), without a tile."""
        dense = Dense(self.q, self.k, self.v, self.score, self.mask)
        p, o, v, do = dense.p, dense.o, dense.v, self.do.double()
        if dtype is not None:
            p, v, do = p.float(), v.float(), do.float()
            o = (p.to(dtype).float() @ v).to(dtype).float()
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        if tile is not None:
            row, column = (slice(at * TILE, (at + 1) * TILE) for at in tile)
            ds[0, 0, row, column] = 0
        if dtype is None:
            return dense.sums(ds.double(), self.leaves)
        # The sums, too, in float32: first over each row, as a program does.
        found = []
        for leaf in self.leaves:
            (each,) = torch.autograd.grad(dense.score.float(), leaf, ds, retain_graph=True)
            found.append(each)
        return found

    def excess(self, found: list[torch.Tensor]) -> list[float]:
        """How many times its bound the worst element of each gradient is off."""
        bounds = allowed(self.q, self.k, self.v, self.score, self.mask, self.do, self.leaves)
        right = self.gradients(None)
        off = [(x - y).abs() / bound for x, y, bound in zip(found, right, bounds, strict=True)]
        return [float(x.max()) for x in off]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_roundings_are_within_the_bound(dtype: torch.dtype) -> None:
    setting = Setting(dtype)
    assert max(setting.excess(setting.gradients(dtype))) < 1


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [(0, 0), (2, 1), (3, 0), (3, 3)], ids=str)
def test_a_tile_that_is_missing_is_seen(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """One of the 40 tiles that the mask leaves, of one batch and head."""
    setting = Setting(dtype)
    assert max(setting.excess(setting.gradients(dtype, tile))) > 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tile", [(2, 1), (3, 0), (3, 3)], ids=str)
def test_every_gradient_sees_it_in_float32(tile: tuple[int, int]) -> None:
    """Those that cancel too: a shift's is 0 of terms that are not, and not 0 without some of them."""
    setting = Setting(torch.float32)
    assert min(setting.excess(setting.gradients(torch.float32, tile))) > 10


def test_what_cancels_is_judged_by_its_terms() -> None:
    """Its largest element says nothing: what float32 leaves of the shift's gradient is far from 0."""
    setting = Setting(torch.float32)
    found, right = (float(setting.gradients(dtype)[0]) for dtype in (torch.float32, None))
    assert abs(found - right) > 1e6 * abs(right)
    assert setting.excess(setting.gradients(torch.float32))[0] < 1
