"""Outcomes of engines' own tests, kept by name."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGTERM
from threading import Timer
from typing import Any

import torch

FOLDER = Path(__file__).parent / "outcomes"


@dataclass(frozen=True, slots=True)
class Outcome:
    """result: passed, failed, skipped (by the test itself) or excluded; why: not in the case of the first."""

    name: str
    result: str
    why: str = ""


def run(name: str, test: Callable[[], Any], excluded: str = "") -> Outcome:
    """Runs a test, unless there is a reason not to, and says how it ended."""
    found = Outcome(name, "excluded", excluded)
    if not excluded:
        try:
            test()
            found = Outcome(name, "passed")
        except unittest.SkipTest as skip:
            found = Outcome(name, "skipped", str(skip))
        except Exception as error:
            traceback.print_exc()
            found = Outcome(name, "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
    print(f"{found.result:9}{name}{': ' if found.why else ''}{found.why}", flush=True)
    return found


#: The part of the tests that is all of them.
WHOLE = "0/1"


def share(module: str, arguments: list[str], workers: int, seconds: float | None = None) -> list[Outcome]:
    """Runs so many processes of a module of this folder, each with its part of the tests; returns what all
    found. The module takes `--part K/N`, and then prints outcomes by `announce` as they come in place of
    keeping them. seconds: after which the processes are ended.
    """
    command = [sys.executable, "-m", module, *arguments, "--part"]
    crew = [
        subprocess.Popen([*command, f"{number}/{workers}"], stdout=subprocess.PIPE, text=True)
        for number in range(workers)
    ]
    timers = [] if seconds is None else [Timer(seconds, process.terminate) for process in crew]
    for timer in timers:
        timer.start()
    with ThreadPoolExecutor(workers) as readers:
        found = [outcome for part in readers.map(_outcomes_of, crew) for outcome in part]
    for timer in timers:
        timer.cancel()
    return found


_MARK = "outcome "


def announce(outcomes: list[Outcome]) -> None:
    """Prints outcomes for `share` to read."""
    for outcome in outcomes:
        print(f"\n{_MARK}{json.dumps(asdict(outcome))}", flush=True)  # pytest may be within a line


def _outcomes_of(process: subprocess.Popen[str]) -> list[Outcome]:
    assert process.stdout is not None
    found = []
    with process:
        for line in process.stdout:
            if line.startswith(_MARK):
                found.append(Outcome(**json.loads(line.removeprefix(_MARK))))
            else:
                print(line, end="", flush=True)
    if process.returncode not in (0, -SIGTERM):
        found.append(Outcome("a process of tests", "failed", f"exit {process.returncode}"))
    return found


def is_mine(number: int, part: str) -> bool:
    """Returns whether the test of this number is in a part, "K/N"."""
    own, _, count = part.partition("/")
    return number % int(count) == int(own)


def passed_before(engine: str, version: str, device: str) -> list[Outcome]:
    """Reads which tests of this version have passed on such a device."""
    path = FOLDER / f"{engine}.json"
    known = json.loads(path.read_text(encoding="utf-8")).get(device, {}) if path.exists() else {}
    passed = known.get("passed", ()) if known.get("version") == version else ()
    if isinstance(passed, dict):
        passed = [f"{test}[{case}]" if case else test for test, cases in passed.items() for case in cases]
    return [Outcome(name, "passed") for name in passed]


def keep(engine: str, version: str, device: str, outcomes: list[Outcome], *, write: bool) -> int:
    """Prints the sum, keeps it where it is to be written, and returns what a command exits with."""
    counts = {
        result: sum(outcome.result == result for outcome in outcomes)
        for result in ("passed", "failed", "skipped", "excluded")
    }
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted"
    print(f"{engine} {version} on {on}: {', '.join(f'{n} {result}' for result, n in counts.items() if n)}")
    if write:
        path = FOLDER / f"{engine}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept[device] = {"version": version, "on": on} | {
            result: found for result in counts if (found := _listed(outcomes, result))
        }
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(counts["failed"] > 0)


#: Names from which on they are kept by test.
_MANY = 1000


def _by_test(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        test, _, case = name.removesuffix("]").partition("[")
        found.setdefault(test, []).append(case)
    return found


def _listed(outcomes: list[Outcome], result: str) -> Any:
    """Names with this result, where there are hundreds by test and case; or reasons and the names that have
    them, with how many where a name stands for several.
    """
    names = [outcome.name for outcome in outcomes if outcome.result == result]
    if result == "passed":
        return names if len(names) < _MANY else _by_test(names)
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result == result:
            count = sum(name == outcome.name for name in names)
            named = outcome.name if count == 1 else f"{outcome.name}, {count} cases"
            if named not in found.setdefault(outcome.why, []):
                found[outcome.why].append(named)
    return found
