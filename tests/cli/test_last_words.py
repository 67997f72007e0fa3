"""Commands whose process a signal ends say what they were doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnc.runtime import last_words
from tests.by_day import each_by_day
from tests.processes import run_program

ROOT = Path(__file__).parents[2]
#: `attnc verify`, whose third case is ended by a signal.
PROGRAM = """
import os, signal, sys
sys.argv = "attnc verify specs/full.attn --variant bf16_d64 --target triton --count 4".split()

def load():
    from attnc.verify.search import AttentionTrial
    check = AttentionTrial.check
    count = 0

    def end(trial, case, fills):
        global seen
        seen += 1
        if seen == 3:
            os.kill(os.getpid(), signal.{name})
        return check(trial, case, fills)

    AttentionTrial.check = end

seen = 0
import attnc.cli
run = attnc.cli._run
attnc.cli._run = lambda argv=None: (load(), run(argv))[1]
sys.exit(attnc.cli.main())
"""


def ended(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    with chdir(ROOT):
        return run_program(PROGRAM.replace("{name}", name), environment=environment)


@pytest.mark.parametrize("name", each_by_day(["SIGSEGV", "SIGKILL"], of=2))
def test_what_a_signal_ended_is_said_with_its_case(name: str) -> None:
    run = ended(name)
    assert run.returncode == 1, run.stderr
    assert f"error: {name} ended the process at a case of full-" in run.stderr
    assert "attnc verify specs/full.attn" in run.stderr.replace(f"{ROOT}/", "")
    assert "--case" in run.stderr


@pytest.mark.parametrize("name", each_by_day(["SIGTERM", "SIGHUP"], of=2))
def test_a_signal_that_was_sent_on_purpose_is_handed_on(name: str) -> None:
    run = ended(name)
    assert run.returncode == 128 + signal.Signals[name]
    assert "error: " not in run.stderr


def test_nothing_is_witnessed_under_a_tool_of_cuda() -> None:
    assert ended("SIGSEGV", CUDA_INJECTION64_PATH="/tool.so").returncode == -signal.SIGSEGV


#: A command that says it has used a GPU, while something would abort the interpreter as it ends.
LEFT = """
import atexit, sys
from types import SimpleNamespace
sys.argv = ["attnc", "verify"]
import attnc.cli

class Aborts:
    def __del__(self):
        print("taken apart", flush=True)

sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: {used}))
sys.modules["left"] = Aborts()
atexit.register(print, "registered")
attnc.cli._run = lambda argv=None: print("ran") or 7
sys.exit(attnc.cli.main())
"""


@pytest.mark.parametrize("used", [False, True])
def test_a_process_that_has_used_a_gpu_ends_at_once(used: bool) -> None:
    """What was registered for its end runs, and all that it printed arrives."""
    command = [sys.executable, "-c", LEFT.replace("{used}", str(used))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    child = ["ran", "registered", *(() if used else ("taken apart",))]
    assert (run.returncode, run.stdout.split("\n")[: len(child)]) == (7, child), run.stderr
    assert run.stdout.count("taken apart") == (1 if used else 2)  # the parent's


def test_an_interrupt_counts_once_until_somebody_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent hands it on to a child that has it from the terminal already."""
    now = iter((10.0, 10.001, 20.0))
    monkeypatch.setattr(last_words, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(last_words, "_interrupted", 0.0)
    with pytest.raises(KeyboardInterrupt):
        last_words._interrupt_once(signal.SIGINT, None)
    last_words._interrupt_once(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        last_words._interrupt_once(signal.SIGINT, None)


def test_exit_codes_are_handed_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnc", "verify"]
    missing = subprocess.run(
        [*command, "none.attn"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert missing.stderr.count("error: ") == 1
    helped = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert helped.returncode == 0
    assert "Usage" in helped.stdout
