"""What nobody writes is NaN while a module is verified."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch

from attnc.support.memory import allocate
from attnc.verify.subject import poison_allocations


def test_memory_of_calls_is_full_of_nan() -> None:
    module = ModuleType("made")
    module.CALL = SimpleNamespace(allocate=allocate)  # type: ignore[attr-defined]  # as generated modules have
    like, layouts = torch.zeros(1), [((3,), (1,), torch.float32), ((2,), (1,), torch.int32)]
    with poison_allocations(module):
        floats, _ = module.CALL.allocate(layouts, like)
        assert floats.isnan().all()
        assert torch.empty(4).isnan().all()
    assert module.CALL.allocate is allocate
