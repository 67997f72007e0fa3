"""What the engine asks of a group of ranks: two collectives, in the order of the stream they are called on.

`Group` is torch.distributed, NCCL or gloo; tests have one of threads. Processes on this machine as ranks
(`on_processes`) are for verification and measurement, not for training.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from attnc.support.cache import own_folder
from attnc.verify.interpreter import ensure_interpreter

#: Into one tensor; torch renamed it.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: How long a rank waits for others to come to symmetric memory; then its GPU gives up with an error. As long
#: as NCCL waits, by default.
_WAIT_MS = 600_000
#: Seconds that a rank whose collective failed waits for the others to say that theirs failed, too.
_ROLL_CALL = 5.0


@runtime_checkable
class Ranks(Protocol):
    """Processes that call the same collectives in the same order."""

    rank: int
    size: int
    symmetric: bool  #: Whether keys are copied out of others' memory, and not exchanged.

    def exchange(
        self, received: torch.Tensor, counts_in: Sequence[int], sent: torch.Tensor, counts_out: Sequence[int]
    ) -> Callable[[], None]:
        """Begins to send elements to every rank and to receive some of each: runs of the two flat tensors, by
        rank. Returns what makes the current stream wait until they are there; it has to be called.
        """

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, stacked by rank; of one shape and type."""

    def outbox(self, size: int) -> SharedBytes:
        """Allocates at least `size` bytes that others copy from. A collective: all ranks ask for the same
        size.
        """


class SharedBytes(Protocol):
    """Bytes of every rank that all can read: memory is this rank's, peers is everybody's, by rank."""

    memory: torch.Tensor
    peers: Sequence[torch.Tensor]

    def meet(self) -> None:
        """Makes the current stream wait until the current streams of all ranks have reached this call."""


class Group:
    """A process group of torch.distributed, or a 1-D DeviceMesh. axis: what a mesh calls it, or "".

    symmetric: keys move by copies out of symmetric memory, which take no multiprocessors from kernels, where
    NCCL's do; for GPUs of one host with NVLink.
    """

    def __init__(self, of: Any = None, *, symmetric: bool = False) -> None:
        self.axis: str = (getattr(of, "mesh_dim_names", None) or ("",))[0]
        if hasattr(of, "get_group"):  # a DeviceMesh
            if of.ndim != 1:
                raise ValueError(f"mesh: expected one axis, such as mesh['cp'], got {of.ndim}")
            of = of.get_group()
        if not dist.is_initialized():
            raise RuntimeError("group: call torch.distributed.init_process_group() first")
        self.group: Any = dist.group.WORLD if of is None else of
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if symmetric and not torch.cuda.is_available():
            raise ValueError("symmetric: expected GPUs of one host, got none")
        self.symmetric = symmetric and self.size > 1
        self._box: SymmetricBox | None = None
        self._calls = 0

    def exchange(
        self, received: torch.Tensor, counts_in: Sequence[int], sent: torch.Tensor, counts_out: Sequence[int]
    ) -> Callable[[], None]:
        wide = sent.element_size()  # as bytes: gloo does not know every type
        self._calls += 1
        call = self._calls
        try:
            work = dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [wide * count for count in counts_in],
                [wide * count for count in counts_out],
                group=self.group,
                async_op=True,
            )
        except RuntimeError as failure:
            raise self._explain("all_to_all", call, failure) from failure

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as failure:
                raise self._explain("all_to_all", call, failure) from failure

        return wait

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.contiguous().view(-1)
        found = torch.empty(self.size * flat.numel(), dtype=x.dtype, device=x.device)
        self._calls += 1
        try:
            all_gather(found, flat, group=self.group)
        except RuntimeError as failure:
            raise self._explain("all_gather", self._calls, failure) from failure
        return found.view(self.size, *x.shape)

    def _explain(self, collective: str, call: int, failure: RuntimeError) -> RuntimeError:
        """Returns the error of a collective with its name, and with the ranks that have not come to it."""
        if isinstance(failure, torch.OutOfMemoryError):
            return failure
        silent = self._find_silent_ranks(call)
        what = f"{collective}, call {call} of the {self.size} ranks{self.axis and f' of {self.axis}'}"
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        why = f"{who} ended, or did not come to it in time" if silent else "it failed on every rank"
        return RuntimeError(f"{what}: {why}: {failure}")

    def _find_silent_ranks(self, call: int) -> list[int]:
        """Returns the ranks that do not say, within seconds, that the collective failed there, too."""
        store, name = (
            dist.distributed_c10d._get_default_store(),
            f"attnc/{self.group.group_name}/{call}",
        )
        end = time.monotonic() + _ROLL_CALL
        try:
            store.set(f"{name}/{self.rank}", "")
            while True:
                silent = [rank for rank in range(self.size) if not store.check([f"{name}/{rank}"])]
                if not silent or time.monotonic() > end:
                    return silent
                time.sleep(0.05)
        except RuntimeError:  # the store has ended with the first rank, which keeps it
            return [0]

    def outbox(self, size: int) -> SharedBytes:
        if self._box is None or self._box.memory.numel() < size:
            torch.cuda.synchronize()  # nobody copies out of the one that was
            self._box = SymmetricBox(self.group, size, self.size)
        return self._box


class SymmetricBox:
    """Memory that is mapped by all GPUs of a group; copies out of it are those of copy engines."""

    def __init__(self, group: Any, size: int, ranks: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self.memory, group.group_name)
        self.peers: Sequence[torch.Tensor] = [
            self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks)
        ]

    def meet(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=_WAIT_MS)


class Alone:
    """A group of one rank, without torch.distributed: what ranks run, on one GPU."""

    rank, size, symmetric = 0, 1, False

    def exchange(
        self,
        received: torch.Tensor,
        counts_in: Sequence[int],
        sent: torch.Tensor,
        counts_out: Sequence[int],
    ) -> Callable[[], None]:
        raise AssertionError("one rank has nobody to exchange with")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def outbox(self, size: int) -> SharedBytes:
        raise AssertionError("one rank has nobody who copies")


# --- processes as ranks -------------------------------------------------------------------------------------


#: Of processes that are ranks. Multicast over NVLink is off unless asked for: it hangs where it is forbidden.
SETTINGS = {
    "PYTHONSAFEPATH": "1",  # nothing is imported from the folder that they are started in
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
        with tempfile.TemporaryDirectory(prefix="ranks-", dir=own_folder()) as folder:
            meeting = (Path(folder) / "meeting").as_uri()
            arguments = (ranks, meeting, seconds, work, arguments)
            running: Any = spawn(_rank, args=arguments, nprocs=ranks, join=False)  # type: ignore[no-untyped-call]  # torch is not typed
            _join(running, deadline)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _join(running: Any, deadline: float | None) -> None:
    end = None if deadline is None else time.monotonic() + deadline
    while not running.join(timeout=None if end is None else 1.0):
        if end is not None and time.monotonic() > end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"ranks were still running after {deadline:.0f} seconds")


def uses_gpus(ranks: int) -> bool:
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
