"""Devices, as far as launches depend on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attnc.support.devices import CPU, MOST_KEPT, gpu_of, kept_room
from tests.support.configs import H200


def test_the_cpu_is_a_device() -> None:
    assert gpu_of(-1) is CPU
    assert H200.arch == "sm_90"


def test_a_gpu_is_as_torch_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"number {index}", major=9, minor=0, shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472, multi_processor_count=132, L2_cache_size=50 << 20,
            total_memory=1 << 37,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
    for index in (0, 3):
        assert gpu_of.__wrapped__(index) == H200._replace(index=index, name=f"number {index}")


def test_a_share_of_the_memory_is_room_for_ds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what a user says."""
    monkeypatch.delenv("ATTNC_KEPT_MIB", raising=False)
    assert kept_room(H200) == kept_room(CPU) == MOST_KEPT
    assert kept_room(H200._replace(memory=64 << 30)) == 2 << 30
    for given, room in (("0", 0), ("300", 300 << 20), ("", MOST_KEPT)):
        monkeypatch.setenv("ATTNC_KEPT_MIB", given)
        assert kept_room(H200) == room
    for given in ("-1", "4G", "²"):
        monkeypatch.setenv("ATTNC_KEPT_MIB", given)
        for read in (lambda: kept_room(H200), lambda: gpu_of.__wrapped__(-1)):  # the first call asks for that
            with pytest.raises(
                ValueError, match="ATTNC_KEPT_MIB, of the environment: expected a number of MiB"
            ):
                read()
