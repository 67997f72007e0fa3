"""The campaign: draws mutants, judges them side by side, and says how many verification sees."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import tools.mutants
from tools.mutants.crew import is_of, judge_draws, read_results, second_of, third_of
from tools.mutants.sample import Draw, Place, draw_mutants, list_places, read_draws, write_draws
from tools.mutants.scores import (
    RACES,
    SCORES,
    describe,
    is_simulated,
    join_results,
    keep_scores,
    list_table,
    summarize,
)


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
    parser.add_argument("--seconds", type=float, default=inf, help="after which no mutant is begun")
    parser.add_argument("--target", action="append", default=[], help="of these targets alone")
    parser.add_argument("--spec", action="append", default=[], help="of these specs alone, by name")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--drawn", type=Path, help="a file of the mutants, which is written if it is not there"
    )
    parser.add_argument("--out", type=Path, help="a file of results, which is gone on with")
    parser.add_argument("--heavy", action="store_true", help="look again at what survived")
    parser.add_argument("--heavy-seconds", type=float, default=inf, help="as --seconds")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="ask the simulators of what --heavy found equal, and cannot tell",
    )
    parser.add_argument("--table", action="store_true", help="print the table of --out, and run nothing")
    parser.add_argument(
        "--keep", nargs=2, metavar=("NAME", "WHERE"), help="commit the scores, by a name, as of this machine"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out: Path = given.out or Path(folder, "mutants.jsonl")
        if given.simulate:
            _simulate(given, out)
        elif not given.table:
            _run(given, out)
        outcomes = join_results(*(read_results(path) for path in (out, second_of(out), third_of(out))))
    print("\n".join(list_table(outcomes)))
    if given.keep:
        name, where = given.keep
        keep_scores(SCORES, name, summarize(outcomes, seed=given.seed, where=where))
    survivors = [outcome for outcome in outcomes if outcome.kind == "survivor"]
    for outcome in survivors:
        print(describe(outcome))
    return int(bool(survivors))


def _run(given: argparse.Namespace, out: Path) -> None:
    """Judges what is drawn and was not judged before; then looks at what survived."""
    import torch

    draws = draw_or_read(given)
    crew = {"workers": given.workers, "devices": torch.cuda.device_count()}
    _judge(draws, out, seconds=given.seconds, looks_again=given.heavy, **crew)
    if given.heavy:  # what was judged by an earlier run, or was left
        survived = {n for n, result in read_results(out).items() if result["outcome"] == "survived"}
        again = {number: draw for number, draw in draws.items() if number in survived}
        _judge(again, second_of(out), seconds=given.heavy_seconds, is_second=True, **crew)


def _simulate(given: argparse.Namespace, out: Path) -> None:
    """Runs mutants of what synchronises on the CPU, where copies come late and warps in any order."""
    asked = {
        number
        for number, result in read_results(second_of(out)).items()
        if result["outcome"] == "equal" and result["mutant"]["operator"] in RACES and is_simulated(result)
    }
    draws = {number: draw for number, draw in draw_or_read(given).items() if number in asked}
    _judge(draws, third_of(out), seconds=given.seconds, workers=given.workers, devices=0)


def draw_or_read(given: argparse.Namespace) -> dict[int, Draw]:
    """Draws the mutants, or reads them."""
    if given.drawn is not None and given.drawn.is_file():
        draws = read_draws(given.drawn)
        return {number: draw for number, draw in draws.items() if _is_wanted(draw.place, given)}
    places = list_places(given.target, given.spec)
    draws = dict(enumerate(draw_mutants(given.count, given.seed, places, given.together)))
    if given.drawn is not None:
        write_draws(given.drawn, draws)
    return draws


def _is_wanted(place: Place, given: argparse.Namespace) -> bool:
    """Returns whether a module is of the targets and specs that are named."""
    asked = ((place.target, given.target), (place.spec, given.spec))
    return all(not names or name in names for name, names in asked)


def _judge(draws: Mapping[int, Draw], out: Path, **options: Any) -> None:
    """Judges those that the file has nothing of, or nothing that says what became of them."""
    known = {number: result for number, result in read_results(out).items() if number in draws}
    stale = [number for number, result in known.items() if not is_of(result, draws[number])]
    if stale:
        sys.exit(f"{out}: {len(stale)} results are of other kernels or operators: take another file")
    left = {
        number: draw
        for number, draw in draws.items()
        if known.get(number, {"outcome": "unknown"})["outcome"] == "unknown"
    }
    count = judge_draws(left, out=out, **options)
    print(f"{out.name}: {count} of {len(left)} that were left", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
