"""Calls with every pair of arguments find every planted mistake."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from attnc.api import repeats
from attnc.compat import call, sdpa
from attnc.verify.memory import MemoryFault
from tests.compat import torch_grid
from tests.compat.flash_grid import run
from tests.compat.planted import BUGS, Bug
from tests.compat.test_pairs import CASES, TORCH_CASES
from tests.replacing import replaced


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forms are made anew, by the text that has the mistake, and so are plans of calls that other tests made;
    what it made is left to no test after it.
    """
    monkeypatch.setattr(call, "_PREPARED", {})
    repeats.forget()
    handle = sdpa.activate("CPU")
    yield
    handle.remove()
    repeats.forget()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_mistakes_are_found(bug: Bug, forgotten: None) -> None:
    with (
        replaced(f"attnc.compat.{bug.place}", bug.old, bug.new),
        pytest.raises((AssertionError, IndexError, MemoryFault)),
    ):
        run_all(bug.call, bug.first)


def run_all(function: str, first: int) -> None:
    runs = [partial(run, case, torch.device("cpu")) for case in CASES if case.call == function]
    runs += [partial(torch_grid.run, name, x) for name, x in TORCH_CASES if name == function]
    for act in (*runs[first:], *runs[:first]):
        act()
