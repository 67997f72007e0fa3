"""GPUs that are not here, for what is decided by the device and by the packages that are installed."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnc.api import fastest
from attnc.support.by_target import Needs
from attnc.support.devices import CPU


def fake_gpu(
    patch: pytest.MonkeyPatch, capability: int = 90, packages: Collection[str] = ("cupy", "triton")
) -> None:
    """Has all tensors be on a GPU of this compute capability, beside these packages, and nothing said yet."""

    def runs(needs: Needs, index: int) -> bool:
        fits = needs.least <= capability and (needs.most is None or capability <= needs.most)
        return fits and needs.package in packages

    gpu = CPU._replace(index=0, name="a GPU", capability=divmod(capability, 10))
    patch.setattr(fastest, "gpu_of", lambda index: gpu)
    patch.setattr(fastest, "index_of", lambda x: 0)
    patch.setattr(fastest, "current_index", lambda: 0)
    patch.setattr(fastest, "runs", runs)
    patch.setattr(fastest, "_ABLE", {})
    patch.setattr(fastest, "_SAID", set())
    patch.setattr(fastest, "_CHOSEN", [""])


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, strides: tuple[int, ...] = ()) -> torch.Tensor:
    """Returns a tensor without memory."""
    with FakeTensorMode():
        if strides:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cuda:0")
        return torch.empty(shape, dtype=dtype, device="cuda:0")
