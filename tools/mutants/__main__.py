"""The campaign: draws mutants, judges them side by side, and says how many verification sees."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tools.mutants
from tools.mutants.crew import judge_draws, read_results
from tools.mutants.sample import Draw, draw_mutants, list_places
from tools.mutants.scores import describe, join_results, list_table


def main() -> int:
    """Runs a campaign, or prints the table of one. Exit status 1 where a mutant survived."""
    parser = argparse.ArgumentParser(
        description=tools.mutants.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=200, help="mutants, those that no compiler takes included"
    )
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other mutants")
    parser.add_argument("--together", type=int, default=1, help="mutants drawn of one module in turn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no mutant is begun")
    parser.add_argument("--target", action="append", default=[], help="of these targets alone")
    parser.add_argument("--spec", action="append", default=[], help="of these specs alone, by name")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a file of results, which is gone on with")
    parser.add_argument("--heavy", action="store_true", help="look again at what survived")
    parser.add_argument("--table", action="store_true", help="print the table of --out, and run nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out: Path = given.out or Path(folder, "mutants.jsonl")
        if not given.table:
            _run(given, out)
        outcomes = join_results(read_results(out), read_results(_second(out)))
    print("\n".join(list_table(outcomes)))
    survivors = [outcome for outcome in outcomes if outcome.kind == "survivor"]
    for outcome in survivors:
        print(describe(outcome))
    return int(bool(survivors))


def _run(given: argparse.Namespace, out: Path) -> None:
    """Judges what was not judged before: all that is drawn, or once more what survived."""
    places = [p for p in list_places(given.target) if not given.spec or p.spec in given.spec]
    draws = dict(enumerate(draw_mutants(given.count, given.seed, places, given.together)))
    known = read_results(out)
    if given.heavy:
        survived = {number for number, result in known.items() if result["outcome"] == "survived"}
        _judge(given, {n: draw for n, draw in draws.items() if n in survived}, _second(out), "heavy")
    else:
        _judge(given, draws, out, "default")


def _judge(given: argparse.Namespace, draws: Mapping[int, Draw], out: Path, oracle: str) -> None:
    import torch

    known = read_results(out)
    left = {number: draw for number, draw in draws.items() if number not in known}
    devices = torch.cuda.device_count()
    count = judge_draws(
        left, out=out, workers=given.workers, seconds=given.seconds, oracle=oracle, devices=devices
    )
    print(f"{count} of {len(left)} that were left", file=sys.stderr)


def _second(out: Path) -> Path:
    """Names the file of what was looked at again."""
    return out.with_suffix(".heavy.jsonl")


if __name__ == "__main__":
    sys.exit(main())
