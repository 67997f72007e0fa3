"""What ends a process whose kernel does not end."""

from __future__ import annotations

import threading

import pytest

from attnc.runtime.watchdog import ENDED, watch
from tests.processes import run_program

WAITS = """
import threading
from attnc.runtime.watchdog import watch
with watch("near for cuda.sm_90a, config 3", "cuda", seconds=0.01):
    threading.Event().wait()
"""


def test_what_never_ends_ends_the_process_and_is_named() -> None:
    done = run_program(WAITS)
    assert done.returncode == ENDED
    assert "near for cuda.sm_90a, config 3 has not ended after 0.01 seconds" in done.stderr


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_ends_is_left_alone(device: str) -> None:
    before = set(threading.enumerate())
    with watch("near", device, seconds=3600):
        during = set(threading.enumerate()) - before
    assert len(during) == (device == "cuda")
    for thread in during:
        thread.join()
    with pytest.raises(KeyError), watch("near", device, seconds=3600):
        raise KeyError
