"""Layouts of tensors, and memory that is made apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.support.memory import allocate, contiguous, layouts_of, made_apart, make_picker, memory_of


def test_layouts_are_those_of_torch() -> None:
    for shape in ((2, 3, 4), (2, 0, 4), (), (1,)):
        made = contiguous(shape, torch.float32)
        assert made == memory_of(torch.empty(shape))
        (x,) = allocate([tuple(made)], torch.empty(()))  # type: ignore[list-item]  # a Layout
        assert memory_of(x) == made
    tensors = [torch.zeros(n, 2) for n in range(7)]
    for count in range(1, 8):
        flat = [part for x in tensors[:count] for part in (x.shape, x.stride(), x.dtype, x.device)]
        assert layouts_of(count)(tensors[:count]) == tuple(flat)
    assert make_picker([2])("abc") == ("c",)
    assert make_picker([2, -1])("abc") == ("c", "c")


def test_what_is_made_apart_is_ordinary_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of inference mode, and waited for; what goes wrong is raised."""
    waits: list[torch.device] = []

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waits.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    with torch.inference_mode():
        x = made_apart(lambda: torch.zeros(2))
        assert not x.is_inference()
    assert waits == [x.device]
    with pytest.raises(ZeroDivisionError):
        made_apart(lambda: torch.zeros(1 // 0))


@pytest.mark.parametrize("places", [(), (2,), (0, 2), (2, 0, 2)])
def test_what_is_picked_is_a_tuple_whatever_it_has(places: tuple[int, ...]) -> None:
    assert make_picker(places)("abc") == tuple("abc"[place] for place in places)
