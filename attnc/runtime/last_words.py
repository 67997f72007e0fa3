"""What a process was doing when something ended it that Python never hears of: a kernel in the simulator that
writes over the stack, a compiler that aborts, a system that has no more memory.

`run_witnessed` works in a child process, which notes what it is about to do in memory that both see. If a
signal ends the child, the parent reads the note and says so.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

#: Bytes of a note, at most.
_ROOM = 1 << 16
_SEPARATOR = "\0"
#: Signals by which somebody ends a command. They come to the parent, and from a terminal to both.
_HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


class LastWords(NamedTuple):
    """The name of the signal that ended a process, what that was doing ("" if it has not said), and the
    command that does it again.
    """

    signal: str
    doing: str
    repro: str


_notes: mmap.mmap | None = None


@contextmanager
def noting(doing: str, repro: Callable[[], str]) -> Iterator[None]:
    """Notes what the block does, for whoever looks on."""
    if _notes is None:
        yield
        return
    _write(_SEPARATOR.join((doing, repro())))
    try:
        yield
    finally:
        _write("")


def can_witness() -> bool:
    """Returns whether processes fork here, and no tool of CUDA's looks on, which follows none that does."""
    return hasattr(os, "fork") and "CUDA_INJECTION64_PATH" not in os.environ


def run_witnessed(work: Callable[[], int]) -> int | LastWords:
    """Runs work in a child process, which exits with what it returns, and returns that; of one that a signal
    has ended the last words. Call it before anything starts threads.
    """
    global _notes
    notes = mmap.mmap(-1, _ROOM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    child = os.fork()
    if child == 0:
        _notes = notes
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt_once)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.exit(work())

    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    heeded = [number for number in _HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, hand_on)) for number in heeded]
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if code >= 0:
        return code
    doing, _, repro = _read(notes).partition(_SEPARATOR)
    return LastWords(signal=signal.Signals(-code).name, doing=doing, repro=repro)


#: Seconds within which a signal is the one before, handed on by the parent.
_SAME = 0.5
_interrupted = -_SAME


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, and ignores the same signal when the parent hands it on."""
    global _interrupted
    before, _interrupted = _interrupted, time.monotonic()
    if _interrupted - before > _SAME:
        raise KeyboardInterrupt


def _write(text: str) -> None:
    assert _notes is not None
    content = text.encode()[: _ROOM - 8]
    _notes[:8] = len(content).to_bytes(8, "little")
    _notes[8 : 8 + len(content)] = content


def _read(notes: mmap.mmap) -> str:
    return notes[8 : 8 + int.from_bytes(notes[:8], "little")].decode(errors="replace")
