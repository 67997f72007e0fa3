"""Plans of gradients for CUDA targets."""

from __future__ import annotations

from attnc.plan.ir import Module
from tests.plan.planning import planned


def module_of(backward: str = "", *, d: int = 64, dtype: str = "bf16", grads: str = "q, k, v") -> Module:
    schedule = "  tile.q = 64" + (f"\n  backward {{\n    {backward}\n  }}" if backward else "")
    return planned(schedule=schedule, d=d, dtype=dtype, grads=grads, target="cuda.sm_80")
