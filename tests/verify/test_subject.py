"""What is verified: configs that calls take, with NaN where nobody writes."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attnc.support.devices import CPU
from attnc.support.memory import allocate
from attnc.verify.memory import MemoryFault
from attnc.verify.subject import Subject, poison_allocations
from tests.verify.judging import spec, subject_of_text


def test_memory_of_calls_is_full_of_what_nobody_has_written() -> None:
    module = ModuleType("made")
    module.CALL = SimpleNamespace(allocate=allocate)  # type: ignore[attr-defined]  # as generated modules have
    like, layouts = torch.zeros(1), [((3,), (1,), torch.float32), ((2,), (1,), torch.int32)]
    with poison_allocations(module):
        floats, integers = module.CALL.allocate(layouts, like)
        assert floats.isnan().all()
        assert (integers == -1).all()
        assert torch.empty(2, dtype=torch.uint8).tolist() == [255, 255]
        assert torch.empty(2, dtype=torch.bool).all()
        assert torch.empty(4).isnan().all()
    assert module.CALL.allocate is allocate


@pytest.mark.parametrize("behind", [False, True])
def test_what_calls_allocate_lies_between_guards(behind: bool) -> None:
    """Words in front of the first line are those of blocks that a list names, and nobody writes there."""
    module = ModuleType("made")
    module.CALL = SimpleNamespace(allocate=allocate)  # type: ignore[attr-defined]  # as generated modules have
    layouts = [((2, 3), (4, 1), torch.int32), ((0, 3), (3, 1), torch.float32)]

    def call(write: bool) -> None:
        with poison_allocations(module):
            made, empty = module.CALL.allocate(layouts, torch.zeros(1))
            assert (made.shape, made.stride(), empty.shape) == ((2, 3), (4, 1), (0, 3))
            outside = made.as_strided((1,), (1,), made.storage_offset() + (7 if behind else -1))
            assert outside.tolist() == [-1]
            made.fill_(0)
            outside.fill_(0 if write else -1)

    call(write=False)
    with pytest.raises(MemoryFault, match="around what a call allocates"):
        call(write=True)


@pytest.mark.parametrize(("room", "numbers"), [(1 << 20, {0, 1}), (1, {1})])
def test_where_no_config_is_sure_to_fit_the_last_is_verified(
    room: int, numbers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As calls take it: what a config needs is an estimate for the neediest GPU of its size."""
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: f16[B, M, H, 16]",
    )
    made = subject_of_text(spec(lines, "tile.q = 16, tile.kv in {16, 32}"))
    gpu = SimpleNamespace(shared_memory_per_block_optin=room, major=9)
    monkeypatch.setattr(Subject, "_gpu", property(lambda self: gpu))
    assert replace(made, device="cuda").tiles().keys() == numbers


def test_calls_see_a_small_cache() -> None:
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: f16[B, M, H, 16]",
    )
    of_first, of_second = (
        vars(subject_of_text(spec(lines, "tile.q = 16, tile.kv = 16")).module)["CALL"].gpu_of
        for _ in range(2)
    )
    assert of_first is of_second  # of one module
    assert of_first(-1) == CPU._replace(l2=1 << 18)
