"""What the links between the GPUs of one host do: copies, collectives, and copies beside a kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from attnc.distributed.group import all_gather
from attnc.runtime.timing import Launch, gpu_ms

MEGABYTES = (8, 32, 128, 256)


def links() -> dict[str, Any]:
    """GB/s by what was done; every rank calls it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    dist.barrier()  # what every process does first would slow the first pair down
    torch.cuda.synchronize()
    if rank == 0:
        found["copy of 256 MB, a pair at a time"] = _pairs(ranks)
    dist.barrier()
    for megabytes in MEGABYTES:
        size = megabytes << 20
        x = torch.empty(size, dtype=torch.uint8, device="cuda")
        y, whole = torch.empty_like(x), torch.empty(size * ranks, dtype=torch.uint8, device="cuda")

        def ring(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            operations = [
                dist.P2POp(dist.isend, x, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, y, (rank - 1) % ranks),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        found[f"all_gather of {megabytes} MB a rank"] = _rate(
            size * (ranks - 1), partial(all_gather, whole, x)
        )
        found[f"all_to_all of {megabytes} MB a rank"] = _rate(
            size * (ranks - 1) // ranks, partial(dist.all_to_all_single, y, x)
        )
        found[f"send and receive of {megabytes} MB"] = _rate(size, ring)
        del x, y, whole
    try:
        found |= _symmetric(rank, ranks)
    except Exception as failure:  # not every machine has it
        found["symmetric memory"] = f"{type(failure).__name__}: {failure}"[:200]
    return found


def _pairs(ranks: int) -> dict[str, float]:
    found, size = {}, 256 << 20
    for source in range(ranks):
        x = torch.empty(size, dtype=torch.uint8, device=f"cuda:{source}")
        for target in range(ranks):
            if source != target:
                y = torch.empty(size, dtype=torch.uint8, device=f"cuda:{target}")
                with torch.cuda.device(source):
                    rate = size / _seconds(partial(y.copy_, x, non_blocking=True))
                    found[f"{source} to {target}"] = round(rate / 1e9, 1)
    torch.cuda.set_device(0)
    return found


def _symmetric(rank: int, ranks: int) -> dict[str, Any]:
    """Copies out of a peer's memory by copy engines, alone and beside a kernel that fills the GPU."""
    import torch.distributed._symmetric_memory as symmetric

    size = 256 << 20
    group: Any = dist.group.WORLD
    memory = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", rank))
    handle: Any = symmetric.rendezvous(memory, group.group_name)
    peer = handle.get_buffer((rank + 1) % ranks, (size,), torch.uint8)
    y = torch.empty(size, dtype=torch.uint8, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch is not typed here
    part = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    whole = torch.empty(part.numel() * ranks, dtype=torch.uint8, device="cuda")

    def beside(copy: Launch) -> Launch:
        def launch() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copy()
            torch.mm(a, b, out=c)
            torch.cuda.current_stream().wait_stream(side)

        return launch

    def pull() -> Any:
        return y.copy_(peer)

    def gather() -> Any:
        return all_gather(whole, part)

    microseconds = {
        "product of 8192, alone": lambda: torch.mm(a, b, out=c),
        "copy of 256 MB, alone": pull,
        "product beside the copy": beside(pull),
        "all_gather of 64 MB a rank, alone": gather,
        "product beside the all_gather": beside(gather),
    }
    return {
        "copy of 256 MB from the next rank, all at once": _rate(size, pull),
        "microseconds": {name: round(1e6 * _seconds(launch), 1) for name, launch in microseconds.items()},
    }


def _rate(size: int, launch: Launch) -> float:
    return round(size / _seconds(launch) / 1e9, 1)


def _seconds(launch: Launch, repeats: int = 10) -> float:
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    return 1e-3 * gpu_ms(launch, repeats)
