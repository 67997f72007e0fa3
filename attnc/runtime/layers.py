"""Projections made ready to be timed: as many copies of the weights as keep them out of the L2 cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attnc.plan.projection import ProjectionModule
from attnc.runtime.dtypes import TORCH
from attnc.runtime.graphs import replayed
from attnc.runtime.loader import load_text
from attnc.runtime.timing import Launch

#: Bytes of weights that are read between two readings of one of them: several times any cache.
_COLD = 512 << 20


class Layer:
    """A projection with fixed N and K on this GPU: copies of its weights, and graphs of its configs."""

    def __init__(self, planned: ProjectionModule, text: str, copies: int | None = None) -> None:
        projection = planned.variant.projection
        sizes = projection.size("N"), projection.size("K")
        if sizes[0] is None or sizes[1] is None:
            raise ValueError(f"{planned.name} has open sizes")
        self.N, self.K = sizes[0], sizes[1]
        self.planned = planned
        self.module: Any = load_text(text)
        dtype = TORCH[projection.dtype]
        self.bytes = self.N * self.K * projection.dtype.bytes
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

        copies = copies or max(2, -(-_COLD // self.bytes))
        self.weights = [normal(self.N, self.K) for _ in range(copies)]
        self.bias = (normal(self.N),) if projection.has_bias else ()
        self._normal = normal

    def call(self, position: int, M: int) -> Launch:
        """One call of a config, which allocates y."""
        x, config = self._normal(M, self.K), self.module.CONFIGS[position]
        function = getattr(self.module, self.planned.name)
        return lambda: function(x, self.weights[0], *self.bias, config=config)

    def graphs(self, positions: Sequence[int], M: int) -> dict[str, Launch]:
        """Captures, for each config that runs here, a graph of one call for each copy of the weights."""
        x = self._normal(M, self.K)
        y = torch.empty((M, self.N), dtype=x.dtype, device="cuda")
        function = getattr(self.module, self.planned.name)
        made: dict[str, Launch] = {}
        for position in positions:
            config = self.module.CONFIGS[position]
            calls = [partial(function, x, w, *self.bias, out=y, config=config) for w in self.weights]
            try:
                made[str(position)] = replayed(calls)
            except Exception:  # too large for this device, or the compiler gave up: not a candidate
                torch.cuda.synchronize()
        return made
