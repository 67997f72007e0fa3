"""How long processes that judge mutants are waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tools.mutants import waiting
from tools.mutants.waiting import Watch


def _is_asleep(number: int) -> bool:
    return not any(each.is_ready for each in Watch(number, 0.0).list_family())


@pytest.mark.parametrize(
    ("program", "is_awaited"),
    [
        ("time.sleep(600)", False),
        ("exec('while True: pass')", True),
        ("subprocess.run(['sleep', '600'])", False),
    ],
)
def test_a_child_is_given_up_where_all_of_it_sleeps_and_not_where_it_has_no_processor(
    program: str, is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are counted, and no clock: one that is ready is waited for however long it takes."""
    command = [sys.executable, "-S", "-c", f"import subprocess, time; print(flush=True); {program}"]
    monkeypatch.setattr(waiting, "_LOOKS", 3)
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        watch = Watch(child.pid, 60.0)
        while not (_is_asleep(child.pid) or is_awaited):
            time.sleep(0.001)
        assert [watch.is_in_vain() for _ in range(6)][-1] != is_awaited
        assert Watch(child.pid, -1.0).is_in_vain()
        os.killpg(child.pid, signal.SIGKILL)


def test_a_child_that_has_ended_is_not_waited_for() -> None:
    """Though what it began keeps its output."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert Watch(child, 60.0).is_in_vain()
    os.waitpid(child, 0)
