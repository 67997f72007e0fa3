"""Searches for every planted bug from scratch, and writes down what finds it.

    python -m tests.planted.search [PART ...] [--only-new | --by-hand]
    python -m tests.planted.search --table

found.json: for each bug whether the cases of `attnc verify` show it or a search by Hypothesis, after how many
cases, and how; null where neither does; "large" where a GPU is needed, and sizes of the case of `attnc verify
--large` that shows it; "hand" where a case was written and no search has run, or where `attnc verify` has
such a case on a GPU alone; `within` in place of `cases`: that case of `attnc verify` shows it, and not all of
those before it were run. cases.json: the smallest case found and what judges it, for the suite to replay.
Takes minutes for a part; `tests/planted/test_planted.py` holds both files to the registry.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.properties import rule_names
from tests.planted.bug import Bug
from tests.planted.hunting import By, Catch, hunt, judge_clean, shows, verify
from tests.planted.registry import BUGS, PARTS

#: By the bug's name in the registry, one line each.
Table: TypeAlias = Mapping[str, Any]
HERE = Path(__file__).parent
#: Smaller cases that are tried.
_ATTEMPTS = 60
FOUND, CASES = HERE / "found.json", HERE / "cases.json"


def read(path: Path) -> dict[str, Any]:
    """The table in a file."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def write(path: Path, table: Table) -> None:
    """Writes a table, a line for each bug in the order of the registry; bugs that are gone are dropped."""
    lines = [f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in BUGS if name in table]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Searches for the bugs of some parts, or of all; keeps the lines of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only-new", action="store_true", help="bugs that found.json does not have alone")
    which.add_argument("--by-hand", action="store_true", help="bugs alone whose case was written by hand")
    parser.add_argument("--table", action="store_true", help="print what finds the bugs of each part")
    chosen = parser.parse_args()
    if chosen.table:
        print("\n".join(table(read(FOUND))))
        return
    ensure_interpreter()
    found, kept = read(FOUND), read(CASES)
    for name, bug in BUGS.items():
        part = name.partition(": ")[0]
        if chosen.parts and part not in chosen.parts:
            continue
        line = found.get(name)
        if _is_by(line, "large") or (chosen.only_new and name in found):
            continue
        if chosen.by_hand and not _is_by(line, "hand"):
            continue
        by, catch = "verify", verify(bug)
        if catch.case is None:
            by, catch = "search", hunt(bug)
        found[name] = (
            None if catch.case is None else {"by": by, "cases": catch.examples, "sign": _sign(catch)}
        )
        if catch.case is not None:
            way: By = "bound" if shows(bug, catch.case, "bound") else _way(catch)
            rule = catch.message.partition(":")[0] if way == "rules" else ""
            kept[name] = {"by": way, "case": asdict(_smallest(bug, catch.case, way, rule))}
        print(f"{name}: {found[name]}", flush=True)
        write(FOUND, found)
        write(CASES, kept)


def table(found: Table) -> Iterator[str]:
    """A line for each part: its bugs, how many each means finds, and after how many cases."""
    yield f"{'':21} planted  verify  search  large  hand  none   cases: median, most"
    for part in (*PARTS, "all"):
        lines = [found[name] for name in BUGS if part in ("all", name.partition(": ")[0])]
        by = Counter("none" if line is None else line["by"] for line in lines)
        took = sorted(n for line in lines if line and (n := line.get("cases") or line.get("within")))
        counts = (f"{by[means]:6}" for means in ("verify", "search", "large", "hand", "none"))
        cases = f"{took[len(took) // 2]:6}, {took[-1]}" if took else ""
        yield f"{part:21} {len(lines):7} {' '.join(counts)}         {cases}"


def _is_by(line: dict[str, Any] | None, means: str) -> bool:
    return line is not None and line["by"] == means


def _sign(catch: Catch) -> str:
    return catch.message.splitlines()[0][:100]


def _way(catch: Catch) -> By:
    rule = catch.message.partition(":")[0]
    if rule not in rule_names():
        return "gradients"
    return "calls" if rule == "calls" else "rules"


def _smallest(bug: Bug, case: Case, by: By, rule: str) -> Case:
    """A smaller case that shows the bug too, and is right without it."""
    if by == "calls":  # of sizes of its own
        return Case(dims={})
    found, tried = case, 0
    changes = _changed(found)
    while tried < _ATTEMPTS and (other := next(changes, None)) is not None:
        if _size(other) < _size(found):
            tried += 1
            if shows(bug, other, by, rule):
                found = other
                changes = _changed(found)
    return found if judge_clean(bug, found, by, rule).ok else case


def _size(case: Case) -> tuple[int, ...]:
    """What to make small, most important first."""
    volume = 1
    for n in case.dims.values():
        volume *= max(n, 1)
    styles = sum(style not in ("random", "none") for style in (case.logits, case.values, case.special))
    return volume, sum(case.dims.values()), len(case.layouts), styles, case.config, case.seed


def _changed(case: Case) -> Iterator[Case]:
    for name, n in case.dims.items():
        for less in sorted({1, 2, n // 2, n - n // 4, n - 1}):
            if 0 < less < n:
                yield replace(case, dims={**case.dims, name: less})
    for name in case.layouts:
        yield replace(case, layouts={k: v for k, v in case.layouts.items() if k != name})
    yield replace(case, special="none")
    yield replace(case, values="random")
    yield replace(case, logits="random")
    if case.config:
        yield replace(case, config=0)
    if case.seed > 1:
        yield replace(case, seed=case.seed % 2)


if __name__ == "__main__":
    main()
