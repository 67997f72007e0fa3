"""Whose kernels a call runs on where its caller does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnc.api import hopper
from attnc.api.compile import SpecError, compile_family
from attnc.api.hopper import HOPPER, NEEDS
from attnc.diagnostics import error
from attnc.flex import family_of, flex_attention, programs
from attnc.flex.programs import TRITON, targets_of
from attnc.source import Source
from attnc.support.by_target import Needs
from attnc.target.dispatch import needs_of
from tests.flex.mods import causal


def on_a_gpu(*, dtype: torch.dtype = torch.bfloat16, d: int = 64) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(1, 2, 8, d, dtype=dtype, device="cuda:0")


@pytest.mark.parametrize(
    ("options", "wanted", "expected"),
    [
        ({}, (), (HOPPER, TRITON)),
        ({"d": 80}, (), (HOPPER, TRITON)),
        ({"d": 72}, (), (TRITON, "")),
        ({"d": 512}, (), (TRITON, "")),
        ({"dtype": torch.float32}, (), (TRITON, "")),
        ({}, (("tile.q", 64),), (TRITON, "")),
    ],
)
def test_hopper_gets_its_own_kernels(
    options: Any, wanted: Any, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: device == 0)
    q = on_a_gpu(**options)
    assert targets_of(None, q, q, q, wanted) == expected
    assert targets_of("cuda.sm_80", q, q, q, wanted) == ("cuda.sm_80", "")
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: False)
    assert targets_of(None, q, q, q, wanted) == (TRITON, "")


def test_what_hopper_needs_is_what_its_target_says() -> None:
    assert Needs(*needs_of(HOPPER)) == NEEDS


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((1024, 512, 64, 1), HOPPER),
        ((1024, 64, 128, 1), HOPPER),  # rows of all heads together
        ((1152, 576, 72, 1), HOPPER),  # part of rows of 144 bytes
        ((1088, 544, 68, 1), TRITON),  # and of 136
        ((0, 512, 64, 1), HOPPER),  # one sequence
        ((1024, 0, 64, 1), TRITON),  # a head that is every head
    ],
)
def test_what_hopper_would_copy_stays_on_triton(
    strides: tuple[int, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    q = on_a_gpu()
    with FakeTensorMode():
        key = torch.empty_strided(q.shape, strides, dtype=q.dtype, device="cuda:0")
    assert targets_of(None, q, key, key, ())[0] == expected


def test_what_a_target_cannot_say_runs_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the caller left the choice; a target that was asked for says what it misses."""
    asked = []

    def compiled(text: str, *, target: str, **options: Any) -> Any:
        asked.append(target)
        if target == HOPPER:
            raise SpecError([error("E0602", "not yet", Source("it.attn", text).span(0, 1), "")])
        return compile_family(text, target=target, **options)

    monkeypatch.setattr(programs, "compile_family", compiled)
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(SpecError, match="not yet"):
        flex_attention(q, q, q, mask_mod=causal, target=HOPPER)
    monkeypatch.setattr("attnc.flex.attention.targets_of", lambda *arguments: (HOPPER, TRITON))
    asked.clear()
    flex_attention(q, q, q, mask_mod=causal)
    flex_attention(q, q, q, mask_mod=causal)
    assert asked == [HOPPER, TRITON]
    family = family_of(q, q, q, mask_mod=causal)
    assert family.target == TRITON
    assert "mask = q_idx >= kv_idx" in family.spec
