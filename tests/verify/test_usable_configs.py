"""Which configs are verified on a GPU: those that calls take there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from attnc.verify.subject import Subject
from tests.verify.judging import spec, subject_of_text

LINES = (
    "input q: f16[B, M, H, 16]",
    "input k, v: f16[B, N, H, 16]",
    "score = dot(q, k)",
    "normalize = softmax",
    "output o: f16[B, M, H, 16]",
)


@pytest.mark.parametrize(("room", "numbers"), [(1 << 20, {0, 1}), (1, {1})])
def test_where_no_config_is_sure_to_fit_the_last_is_verified(
    room: int, numbers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As calls take it: what a config needs is an estimate for the neediest GPU of its size."""
    made = subject_of_text(spec(LINES, "tile.q = 16, tile.kv in {16, 32}"))
    gpu = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(Subject, "_gpu", property(lambda self: gpu))
    assert replace(made, device="cuda").tiles().keys() == numbers
