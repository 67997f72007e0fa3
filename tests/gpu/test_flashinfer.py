"""FlashInfer's wrappers and functions on a GPU, every value of an argument beside every value of every other,
and a captured graph that serves later plans.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.adapters import flashinfer
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, compare, csr, workspace
from tests.adapters.flashinfer.test_pairs import CASES, run
from tests.adapters.oracle import attend, pages
from tests.pairs import Values

fi: Any = flashinfer  # what a program without types calls


@pytest.mark.parametrize(("call", "x"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_pair_of_arguments(call: str, x: Values, device: torch.device) -> None:
    with device:
        run(call, x)


def test_a_captured_prefill_serves_later_plans(device: torch.device) -> None:
    """With masks of its own in each, and as many queries."""
    with device:
        buffers = [torch.empty(size) for size in (4, 4, 12, 3, 40, 4)]
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
        q = torch.randn(6, HEADS * GROUP, SIZE)
        k, v, table, keys, values = pages([9, 5, 17], PAGE, HEADS, SIZE)
        graph, o = torch.cuda.CUDAGraph(), torch.empty_like(q)
        for turn, rows in enumerate(([4, 1, 1], [1, 0, 5], [2, 2, 2])):
            seen = [torch.rand(m, n) < 0.6 for m, n in zip(rows, (9, 5, 17), strict=True)]
            starts = torch.tensor([0, *rows]).cumsum(0).int()
            mask = torch.cat([x.flatten() for x in seen])
            tables = csr([9, 5, 17], table)
            sizes = (HEADS * GROUP, HEADS, SIZE, PAGE)
            wrapper.plan(starts, *tables, *sizes, custom_mask=mask, q_data_type="float32")
            if turn == 0:
                wrapper.run(q, (k, v), out=o)  # compiles
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    wrapper.run(q, (k, v), out=o)
            graph.replay()
            for b, (part, found) in enumerate(zip(torch.split(q, rows), torch.split(o, rows), strict=True)):
                compare(found, None, attend(part, keys[b], values[b], scale=SIZE**-0.5, seen=seen[b]))
