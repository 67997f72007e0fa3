"""Turns on a GPU that several processes use: large cases run few at a time, and none beside what is timed."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from attnc.verify.case import Case

#: The variable that may name a file: its lock is held, shared, while a case runs. Who times something holds
#: it alone, as by util-linux's `flock FILE COMMAND`.
LOCK = "ATTNC_MUTANTS_LOCK"
#: Cases of gigabytes that run side by side.
_AT_ONCE = 2
#: Seconds between two looks.
_GLANCE = 0.05
_LOCKS = Path("/proc/locks")


@contextmanager
def turn_for(case: Case) -> Iterator[None]:
    """Waits until a case may run, and holds its place while it does."""
    with ExitStack() as stack:
        if path := os.environ.get(LOCK):
            _share(stack.enter_context(Path(path).open("a")))
        if case.is_far:
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            places = [Path(tempfile.gettempdir(), f"attnc-mutants-{gpu}-{n}.lock") for n in range(_AT_ONCE)]
            locks = [stack.enter_context(place.open("w")) for place in places]
            _wait_for(lambda: any(_takes(lock, fcntl.LOCK_EX) for lock in locks))
        yield


def _share(lock: IO[str]) -> None:
    """Takes a lock with others. Who waits to have it alone goes first: else there were always others."""
    inode = os.fstat(lock.fileno()).st_ino
    _wait_for(lambda: not _is_awaited(inode) and _takes(lock, fcntl.LOCK_SH))


def _is_awaited(inode: int) -> bool:
    """Returns whether somebody waits for the lock of a file, where the system tells: lines with an arrow."""
    try:
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(" -> " in line and f":{inode} " in line for line in lines)


def _takes(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(is_ready: Callable[[], bool]) -> None:
    while not is_ready():
        time.sleep(_GLANCE)
