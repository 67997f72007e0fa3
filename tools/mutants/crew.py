"""Batches of mutants, judged side by side by processes; results are written as they come, one a line.

A file of results is gone on with: what it has is not judged again. Mutants come in waves, in the order of the
draw, so what there is when the time is over is a sample of every target and phase. No mutant is begun then,
and those that are begun end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from tests.processes import environment_of
from tools.mutants.sample import Draw, Place

Result: TypeAlias = Mapping[str, Any]
#: Mutants of one module that one process judges in turn, at most; fewer of those that are looked at again.
BATCH, SECOND_BATCH = 40, 3
#: Mutants among which those of a module are judged together: the next so many wait for them.
WAVE = 300
#: Seconds that mutants may take which are begun when the time is over.
_GRACE = 20.0


def read_results(path: Path) -> dict[int, Result]:
    """Reads a file of results, by their numbers. A line that was not finished is left out."""
    found: dict[int, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            result = json.loads(line)
            found[result["number"]] = result
    return found


def is_of(result: Result, draw: Draw) -> bool:
    """Returns whether a result is of this mutant: a seed draws others once specs or operators change."""
    return result.items() >= asdict(draw).items()


def second_of(path: Path) -> Path:
    """Names the file of what was looked at again, beside a file of results."""
    return path.with_suffix(".heavy.jsonl")


def third_of(path: Path) -> Path:
    """Names the file of what the simulators say, beside a file of results of a GPU."""
    return path.with_suffix(".simulated.jsonl")


def list_batches(
    draws: Mapping[int, Draw], *, is_second: bool, looks_again: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields mutants of one module and wave, as hosts read them; modules come in the order of their first
    mutants. is_second: whether they survived, and are looked at again; looks_again: whether those that
    survive are, at once.
    """
    most, modules = SECOND_BATCH if is_second else BATCH, dict[tuple[int, Place], list[int]]()
    for number, draw in draws.items():
        modules.setdefault((number // WAVE, draw.place), []).append(number)
    for (_, place), numbers in modules.items():
        for first in range(0, len(numbers), most):
            part = numbers[first : first + most]
            yield {
                "is_second": is_second,
                "looks_again": looks_again,
                "place": asdict(place),
                "numbers": part,
                "phases": [draws[number].phase for number in part],
                "mutants": [asdict(draws[number].mutant) for number in part],
            }


def judge_draws(
    draws: Mapping[int, Draw],
    *,
    out: Path,
    workers: int,
    seconds: float,
    devices: int,
    is_second: bool = False,
    looks_again: bool = False,
) -> int:
    """Judges mutants by so many processes until the time is over, and appends results to a file. Returns how
    many. is_second: whether they survived, and are looked at again; looks_again: whether those that survive
    are, at once: that goes to a second file (`second_of`).
    """
    second = out if is_second else second_of(out)
    for path in {out, second}:
        if path.is_file() and not path.read_bytes().endswith(b"\n"):
            path.write_bytes(path.read_bytes() + b"\n")  # behind a line that was not finished
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, ThreadPoolExecutor(workers) as pool:
        listed = list_batches(draws, is_second=is_second, looks_again=looks_again)
        batches = [{**batch, "folder": folder} for batch in listed]
        crew = _Crew(draws, batches, (out, second), time.monotonic() + seconds, devices)
        last = threading.Timer(min(seconds + _GRACE, threading.TIMEOUT_MAX), crew.stop)
        last.start()
        try:
            list(pool.map(crew.work, range(workers)))
        finally:
            last.cancel()
            crew.stop()
    return crew.count


class _Crew:
    """Processes that take batches from one list. files: of results, and of what was looked at again."""

    def __init__(
        self,
        draws: Mapping[int, Draw],
        batches: Sequence[Mapping[str, Any]],
        files: tuple[Path, Path],
        until: float,
        devices: int,
    ) -> None:
        self.draws, self.batches, self.until, self.devices = draws, iter(batches), until, devices
        self.files, self.count, self.total = files, 0, sum(len(batch["mutants"]) for batch in batches)
        self.lock, self.hosts = threading.Lock(), list[subprocess.Popen[str]]()
        self.said = time.monotonic()

    def work(self, number: int) -> None:
        """Runs a host, until there are no batches or is no time."""
        if time.monotonic() > self.until:
            return
        host = self._start(number)
        try:
            while (batch := self._next()) is not None:
                assert host.stdin is not None
                assert host.stdout is not None
                host.stdin.write(json.dumps({**batch, "until": self.until}) + "\n")
                host.stdin.flush()
                for line in host.stdout:
                    if line == "{}\n":
                        break
                    self._keep(json.loads(line))
                else:
                    if time.monotonic() < self.until:
                        raise RuntimeError(f"a host has ended: {host.wait()}")
                    return
        finally:
            self._end(host)

    def stop(self) -> None:
        """Ends what still runs; each `work` then ends too."""
        for host in tuple(self.hosts):
            _kill(host)

    def _start(self, number: int) -> subprocess.Popen[str]:
        host = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.host", *(["--gpu"] if self.devices else [])],
            env=environment_of(number, self.devices),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "ATTNC_MUTANTS_ERRORS" not in os.environ else None,
            text=True,
            start_new_session=True,
        )
        self.hosts.append(host)
        return host

    def _end(self, host: subprocess.Popen[str]) -> None:
        _kill(host)
        self.hosts.remove(host)
        host.wait()
        for pipe in (host.stdin, host.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _next(self) -> Mapping[str, Any] | None:
        with self.lock:
            return None if time.monotonic() > self.until else next(self.batches, None)

    def _keep(self, judgment: Mapping[str, Any]) -> None:
        draw = self.draws[judgment["number"]]
        file = self.files[judgment.get("is_second", False)]
        said = {name: value for name, value in judgment.items() if name != "is_second"}
        line = json.dumps({**said, **asdict(draw)})
        with self.lock:
            with file.open("a", encoding="utf-8") as results:
                results.write(line + "\n")
            self.count += 1
            if time.monotonic() - self.said > 10:
                self.said = time.monotonic()
                print(f"{self.count} of {self.total}", file=sys.stderr, flush=True)


def _kill(host: subprocess.Popen[str]) -> None:
    """Ends a host and its children."""
    with suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)
