"""What launches of Triton kernels need of the thread that makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.verify.interpreter import ensure_interpreter

pytestmark = pytest.mark.quick


def test_a_thread_without_a_context_gets_one_where_descriptors_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton refuses to make one there; a launch of torch's brings the context."""
    ensure_interpreter()
    from attnc.support.triton_call import in_context

    brought: list[object] = []

    def make(problem: str, *, size: int) -> int:
        if problem and not brought:
            raise RuntimeError(problem)
        return size

    monkeypatch.setattr(torch, "zeros", lambda shape, device: brought.append(device))
    assert in_context(make, "", size=3) == 3
    assert brought == []
    with pytest.raises(RuntimeError, match="out of memory"):
        in_context(make, "out of memory", size=3)
    assert brought == []
    assert in_context(make, "Failed to create it: invalid device context", size=3) == 3
    assert brought == ["cuda"]


def test_neighbours_of_several_rounds_take_turns() -> None:
    ensure_interpreter()
    from attnc.support.triton_call import Kernel, TritonAttention

    rounds = {"lists": "1", "dq": "n", "dk": "n", "sum": "1"}
    kernels = tuple(Kernel(function=name, grid="1", rounds=count) for name, count in rounds.items())
    call = SimpleNamespace(_launch=lambda kernel, place: kernel.function)
    made: Any = TritonAttention.made_ready
    for count, expected in ((0, []), (1, ["dq", "dk"]), (2, ["dq", "dk", "dq", "dk"])):
        place = SimpleNamespace(names={"n": count})
        assert made(call, kernels, place) == ("lists", *expected, "sum")
