"""A watchdog for kernels on a GPU: one that waits for a barrier at which no thread arrives never ends.

No exception reaches a process that waits in the driver, so a thread watches it, says what was running,
and ends the process; the driver then takes the kernel off the GPU. On a CPU the simulator tells a deadlock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

#: Seconds: a kernel that is searched or tuned takes milliseconds, and its compiler less than a minute.
PATIENCE = 120.0
#: Exit status of a process that was ended, that of coreutils' `timeout`.
ENDED = 124


@contextmanager
def watch(what: str, device: str, seconds: float = PATIENCE) -> Iterator[None]:
    """Ends the process if the block, including its work on the GPU, takes longer. what: named in the
    message.
    """
    if device == "cpu":
        yield
        return
    timer = Timer(seconds, _end, (what, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(what: str, seconds: float) -> None:
    said = (
        f"attnc: {what} has not ended after {seconds:g} seconds: the process is ended, and with it the kernel"
    )
    print(said, file=sys.stderr, flush=True)
    os._exit(ENDED)
