"""The campaign: draws mutants, judges them side by side, and says how many verification sees."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tools.mutants
from tools.mutants.judge import Judge, Verdict
from tools.mutants.sample import Draw, draw_mutants, list_places

#: In the order of a table's columns.
_COLUMNS = ("mutants", "killed", "survived", "invalid")


def main() -> int:
    """Runs a campaign, or prints the table of one. Exit status 1 where a mutant survived."""
    parser = argparse.ArgumentParser(
        description=tools.mutants.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=200, help="mutants, those that no compiler takes included"
    )
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other mutants")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no mutant is begun")
    parser.add_argument("--target", action="append", default=[], help="of these targets alone")
    parser.add_argument("--spec", action="append", default=[], help="of these specs alone, by name")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a file of results, written as they come")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and run nothing")
    given = parser.parse_args()
    if given.table is not None:
        results = json.loads(given.table.read_text(encoding="utf-8"))["mutants"]
        print("\n".join(list_table(results)))
        return 0
    places = [p for p in list_places(given.target) if not given.spec or p.spec in given.spec]
    draws = tuple(draw_mutants(given.count, given.seed, places))
    header = {"seed": given.seed, "count": given.count, "targets": given.target, "specs": given.spec}
    results = run(draws, given.workers, given.seconds, lambda found: write(given.out, header, found))
    print("\n".join(list_table(results)))
    for result in results:
        if result["outcome"] == "survived":
            print(describe(result))
    return int(any(result["outcome"] == "survived" for result in results))


def run(
    draws: Sequence[Draw],
    workers: int,
    seconds: float,
    keep: Callable[[list[Mapping[str, Any]]], None] = lambda _: None,
) -> list[Mapping[str, Any]]:
    """Judges mutants by so many processes, and returns the results as they came. keep: gets all of them,
    every ten seconds.
    """
    devices = _count_devices()
    started = said = time.monotonic()
    idle: SimpleQueue[Judge] = SimpleQueue()
    judges = [Judge(number, devices) for number in range(workers)]
    for one in judges:
        idle.put(one)
    results: list[Mapping[str, Any]] = []

    def judge(draw: Draw) -> tuple[Draw, Verdict | None, float]:
        began = time.monotonic()
        if began - started > seconds:
            return draw, None, 0.0
        mine = idle.get()
        try:
            return draw, mine.judge(draw), time.monotonic() - began
        finally:
            idle.put(mine)

    try:
        with ThreadPoolExecutor(workers) as pool:
            for draw, verdict, took in pool.map(judge, draws):
                if verdict is not None:
                    results.append({**asdict(draw), **asdict(verdict), "seconds": round(took, 1)})
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    keep(results)
                    print(f"{len(results)} of {len(draws)}", file=sys.stderr, flush=True)
    finally:
        for one in judges:
            one.stop()
        keep(results)
    return results


def write(path: Path | None, header: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> None:
    """Writes the results so far."""
    if path is not None:
        lines = ",\n".join(json.dumps(result) for result in results)
        path.write_text(f'{json.dumps(header)[:-1]}, "mutants": [\n{lines}\n]}}\n', encoding="utf-8")


def list_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields lines: for each target and phase, then for each operator, how many were killed of those that
    compile.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {"all": list(results)}
    for result in results:
        groups.setdefault(f"{result['place']['target']} {result['phase']}", []).append(result)
    for result in results:
        groups.setdefault(result["mutant"]["operator"], []).append(result)
    yield f"{'':26}" + "".join(f"{column:>10}" for column in _COLUMNS) + "     score"
    for name, found in groups.items():
        outcomes = Counter(result["outcome"] for result in found)
        lived, invalid = outcomes["survived"], outcomes["invalid"]
        killed = len(found) - lived - invalid
        score = f"{100 * killed / (killed + lived):8.1f} %" if killed + lived else ""
        yield f"{name:26}" + "".join(f"{n:10}" for n in (len(found), killed, lived, invalid)) + score


def describe(result: Mapping[str, Any]) -> str:
    """Returns a line that says what a mutant is."""
    place, mutant = result["place"], result["mutant"]
    old, new = (" ".join(mutant[side].split())[:90] for side in ("old", "new"))
    where = (
        f"{place['attention']} {place['variant']} for {place['target']}, {mutant['file']}:{mutant['line']}"
    )
    return f"survived  {where}, {mutant['function']}: {mutant['operator']}: {old}  ->  {new}"


def _count_devices() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
