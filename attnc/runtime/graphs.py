"""CUDA graphs of calls, for timing kernels that are shorter than their launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnc.runtime.timing import Launch


def replayed(calls: Sequence[Launch]) -> Launch:
    """A launch of all the calls in turn, captured once; they are made once before, for what they allocate."""
    stream: Any = torch.cuda.Stream  # torch ships streams and graphs without annotations
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def launch(_alive: Sequence[Launch] = calls) -> None:  # what a graph reads and writes, it does not own
        graph.replay()

    return launch
