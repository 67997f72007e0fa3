"""Engines without their packages: modules of snapshots, and requests whose keys lie in pages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from tests.adapters.contract import snapshot, stubs
from tests.adapters.oracle import attend


@contextmanager
def engine(name: str, backend: str) -> Iterator[ModuleType]:
    """A backend's module, imported against the stubs of an engine."""
    made = stubs(snapshot(name))
    before = {module: sys.modules.get(module) for module in (backend, *made)}
    sys.modules.update(made)
    sys.modules.pop(backend, None)
    try:
        yield importlib.import_module(backend)
    finally:
        for module, old in before.items():
            sys.modules.pop(module, None)
            if old is not None:
                sys.modules[module] = old


@dataclass(slots=True)
class Request:
    """The keys and values of a request so far, [N, Hkv, D], and its pages."""

    pages: list[int] = field(default_factory=list)
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else len(self.keys)

    def append(self, k: torch.Tensor, v: torch.Tensor, page: int, free: list[int]) -> list[int]:
        """The slots of new tokens."""
        start = self.length
        self.keys = k if self.keys is None else torch.cat([self.keys, k])
        self.values = v if self.values is None else torch.cat([self.values, v])
        while len(self.pages) * page < self.length:
            self.pages.append(free.pop())
        return [self.pages[at // page] * page + at % page for at in range(start, self.length)]

    def fork(self, tokens: int, page: int) -> Request:
        """Another request that begins with the same tokens: full pages of them are shared."""
        assert tokens % page == 0
        assert self.keys is not None
        assert self.values is not None
        return Request(self.pages[: tokens // page], self.keys[:tokens], self.values[:tokens])


#: The largest number of each type of 8 bits.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def coded(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """What a cache of 8 bits has for x, [T, Hkv, D]; scale: one, or [Hkv]."""
    scaled = (x.float() / scale.reshape(-1, 1)).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype)


def meant(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers that codes stand for."""
    return codes.float() * scale.reshape(-1, 1)


def check(found: torch.Tensor, q: torch.Tensor, request: Request, **options: Any) -> None:
    """The attention of a request's last tokens against float64, on the CPU."""
    assert request.keys is not None
    assert request.values is not None
    scale = options.pop("scale", q.shape[-1] ** -0.5)
    given: dict[str, Any] = {
        name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    tensors = (q.cpu(), request.keys.cpu(), request.values.cpu())
    expected, _ = attend(*tensors, scale=scale, **given)
    within = 1e-5 if q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu().double(), expected, rtol=within, atol=within)
