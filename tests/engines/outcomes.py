"""Outcomes of engines' own tests, kept by name."""

from __future__ import annotations

import json
import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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


def _listed(outcomes: list[Outcome], result: str) -> Any:
    """Names with this result, or reasons and the names that have them, with how many where a name stands for
    several.
    """
    names = [outcome.name for outcome in outcomes if outcome.result == result]
    if result == "passed":
        return names
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result == result:
            count = sum(name == outcome.name for name in names)
            named = outcome.name if count == 1 else f"{outcome.name}, {count} cases"
            if named not in found.setdefault(outcome.why, []):
                found[outcome.why].append(named)
    return found
