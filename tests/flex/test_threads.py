"""Threads that meet new mods at the same time: a server's, or those of data parallelism."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import pytest
import torch

from attnc.flex import flex_attention, programs


def window(size: int) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < size)


def test_each_thread_gets_the_kernel_of_its_own_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    """More numbers than have kernels of their own, so that they become arguments on the way."""
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    monkeypatch.setattr(programs, "_SPECIAL", 2)
    q = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    def attend(size: int) -> torch.Tensor:
        o: torch.Tensor = flex_attention(q, q, q, mask_mod=window(size))
        return o

    sizes = range(1, 6)
    with ThreadPoolExecutor(len(sizes)) as pool:
        found = list(pool.map(attend, sizes))
    for size, o in zip(sizes, found, strict=True):
        assert torch.equal(o, attend(size))
        kept = torch.ones(16, 16).tril() * (1 - torch.ones(16, 16).tril(-size))
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=kept.bool())
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


def test_kernels_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that becomes an argument while a kernel that has it built in is made: that is kept apart."""
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    compiled, others = programs._compiled, list[Thread]()
    q = torch.zeros(1, 1, 4, 16)

    def attend(size: int) -> None:
        flex_attention(q, q, q, mask_mod=window(size))

    def compiled_beside_another(*given: Any) -> Any:
        if not others:
            others.append(Thread(target=attend, args=(2,)))
            others[0].start()
            others[0].join(0.05)
            assert others[0].is_alive()
        return compiled(*given)

    monkeypatch.setattr(programs, "_compiled", compiled_beside_another)
    attend(1)
    others[0].join()
    (program,) = programs._PROGRAMS.values()
    assert len(program.kernels) == 2
