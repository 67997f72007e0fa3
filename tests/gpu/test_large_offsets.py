"""Element offsets beyond 2^31, tensor by tensor, in a reserved range of addresses of which little is memory.

CUDA's virtual memory management reserves a range of tens of gigabytes and maps one piece of memory where the
tensor's elements lie; an address that was computed in 32 bits is one that nothing is mapped at, and faults.
So every case runs in a process of its own. Without memory for it the range costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.targets import TARGETS, skip_without_launcher

#: Tensors of `local_sink`, with gradients, and the axes whose strides are made large, one at a time.
CASES = [
    *((name, axis) for name in ("q", "k", "v", "o", "do") for axis in ("batch", "head", "row")),
    *((name, axis) for name in ("lse", "dlse") for axis in ("batch", "head")),
    ("sink", "head"),
]
#: Of a decode over pages.
PAGED = [("block_table", "batch"), ("block_table", "row"), ("k", "page"), ("v", "page"), ("kv_len", "batch")]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "axis"), CASES)
def test_training(name: str, axis: str, target: str) -> None:
    run("training", target, name, axis)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "axis"), PAGED)
def test_decode_from_pages(name: str, axis: str, target: str) -> None:
    run("paged", target, name, axis)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("axis", ["head", "row"])
def test_bias(axis: str, target: str) -> None:
    run("bias", target, "pair", axis)


def run(kind: str, target: str, name: str, axis: str) -> None:
    """One case in a new process, since a fault ends it."""
    skip_without_launcher(target)
    command = [sys.executable, "-m", "tests.gpu.large_offsets", kind, target, name, axis]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
