"""Streams of one device: exchanges beside kernels, and kernels that follow each other without a gap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class Lanes:
    """The caller's stream, one for exchanges, and a second one for kernels, so that one begins while the last
    blocks of another still run. On a CPU there is one order of things, and all this is nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._main: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side, self._second = _streams(device)
            for stream in (self._side, self._second):
                stream.wait_stream(self._main)

    @contextmanager
    def exchanging(self, *tensors: torch.Tensor) -> Iterator[None]:
        """What is called within runs beside the kernels, in order with other exchanges, and reads or writes
        tensors of theirs.
        """
        if self._main is None:
            yield
            return
        for x in tensors:
            x.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield

    @contextmanager
    def kernel(self, number: int, *tensors: torch.Tensor) -> Iterator[None]:
        """What is called within runs on one of the two streams for kernels, and reads tensors of others."""
        if self._main is None:
            yield
            return
        stream = self._second if number % 2 else self._main
        for x in tensors:
            x.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """What the stream at hand has been told to do so far."""
        return torch.cuda.current_stream(self.device).record_event() if self._main is not None else None

    def after(self, event: torch.cuda.Event | None) -> None:
        """The stream at hand waits for that."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """The caller's stream waits for all that was started."""
        if self._main is not None:
            for stream in (self._side, self._second):
                self._main.wait_stream(stream)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Makes a stream for exchanges, which are short and should not wait for blocks of a kernel, and a second
    one for kernels.
    """
    return _stream(device, -1), _stream(device, 0)


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]  # torch is not typed
