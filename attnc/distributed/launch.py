"""Processes on this machine as the ranks of a group: for verification and measurement, not for training."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attnc.verify.interpreter import ensure_interpreter

#: Of processes that are ranks. Multicast over NVLink is off unless asked for: it hangs where it is forbidden.
SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def on_processes(
    ranks: int,
    work: Callable[..., None],
    *arguments: Any,
    seconds: float = 600.0,
    deadline: float | None = None,
) -> None:
    """Runs work(rank, *arguments) in `ranks` new processes that are a group: NCCL with a GPU each, or gloo
    and interpreted kernels.

    `work` is a function of a module. Raises torch.multiprocessing.ProcessRaisedException with the text of the
    first error of a rank; a collective that waits longer than `seconds` is an error of its own. After
    `deadline` seconds processes that still run are ended, with a TimeoutError.
    """
    from torch.multiprocessing.spawn import spawn

    settings = SETTINGS if uses_gpus(ranks) else {**SETTINGS, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update({name: before[name] or value for name, value in settings.items()})
    try:
        with tempfile.TemporaryDirectory(prefix="attnc-ranks-") as folder:
            meeting = (Path(folder) / "meeting").as_uri()
            arguments = (ranks, meeting, seconds, work, arguments)
            running: Any = spawn(_rank, args=arguments, nprocs=ranks, join=False)  # type: ignore[no-untyped-call]  # torch is not typed
            _join(running, deadline)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]


def _join(running: Any, deadline: float | None) -> None:
    end = None if deadline is None else time.monotonic() + deadline
    while not running.join(timeout=None if end is None else 1.0):
        if end is not None and time.monotonic() > end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"ranks were still running after {deadline:.0f} seconds")


def uses_gpus(ranks: int) -> bool:
    """Whether every rank gets a GPU."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


def _rank(
    rank: int, ranks: int, meeting: str, seconds: float, work: Callable[..., None], arguments: Any
) -> None:
    gpus = uses_gpus(ranks)
    if gpus:
        torch.cuda.set_device(rank)
    else:
        ensure_interpreter()
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", rank) if gpus else None,
    )
    try:
        work(rank, *arguments)
    finally:
        dist.destroy_process_group()
