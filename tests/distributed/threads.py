"""Ranks as threads of one process, of which one runs at a time: the engine without its processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from attnc.distributed.group import SharedBytes

_Result = TypeVar("_Result")


class Meeting:
    """Where the threads of some ranks meet. One of them runs at a time: Triton's interpreter is made for no
    more.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=120)
        self.boxes: list[Any] = [None] * size

    def swap(self, rank: int, mine: Any) -> list[Any]:
        """What every rank brought."""
        self.boxes[rank] = mine
        self._wait()
        found = list(self.boxes)
        self._wait()
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class Thread:
    """One rank (`group.Ranks`). bytes_sent: what it has sent to others; symmetric: whether keys are copied
    out of each other's memory.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.bytes_sent, self.symmetric = 0, False
        self._box: ThreadBox | None = None

    def outbox(self, size: int) -> SharedBytes:
        if self._box is None or self._box.memory.numel() < size:
            self._box = ThreadBox(self, size)
        return self._box

    def exchange(
        self,
        received: torch.Tensor,
        counts_in: Sequence[int],
        sent: torch.Tensor,
        counts_out: Sequence[int],
    ) -> Callable[[], None]:
        assert sum(counts_out) == sent.numel()
        assert sum(counts_in) == received.numel()
        assert not counts_out[self.rank], "a rank has nothing to send to itself"
        self.bytes_sent += sent.numel() * sent.element_size()
        every = self.meeting.swap(self.rank, (sent.clone(), list(counts_out)))
        at = 0
        for rank, (x, counts) in enumerate(every):
            first, count = sum(counts[: self.rank]), counts[self.rank]
            assert count == counts_in[rank], (
                f"rank {rank} sends {count}, {self.rank} expects {counts_in[rank]}"
            )
            received[at : at + count] = x[first : first + count]
            at += count
        return lambda: None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.swap(self.rank, x.clone()))


class ThreadBox:
    """Memory that all threads can read."""

    def __init__(self, rank: Thread, size: int) -> None:
        self._rank, self.memory = rank, torch.zeros(size, dtype=torch.uint8)
        self.peers: Sequence[torch.Tensor] = rank.meeting.swap(rank.rank, self.memory)

    def meet(self) -> None:
        self._rank.meeting.swap(self._rank.rank, None)


def on_ranks(size: int, work: Callable[[Thread], _Result]) -> list[_Result]:
    """What `work` returns on each rank; raises the first error of any."""
    meeting, results = Meeting(size), [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = work(Thread(meeting, rank))  # type: ignore[call-overload]  # a list of results
            except BaseException as failure:
                errors[rank] = failure
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results  # type: ignore[return-value]  # all are there
