"""The campaign: draws mutants, judges them side by side, and says how many verification sees."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import tools.mutants
from tools.mutants.crew import is_of, judge_draws, read_results, second_of
from tools.mutants.sample import draw_mutants, list_places
from tools.mutants.scores import SCORES, describe, join_results, keep_scores, list_table, summarize


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
    parser.add_argument(
        "--keep", nargs=2, metavar=("NAME", "WHERE"), help="commit the scores, by a name, as of this machine"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out: Path = given.out or Path(folder, "mutants.jsonl")
        if not given.table:
            _run(given, out)
        outcomes = join_results(read_results(out), read_results(second_of(out)))
    print("\n".join(list_table(outcomes)))
    if given.keep:
        name, where = given.keep
        keep_scores(SCORES, name, summarize(outcomes, seed=given.seed, where=where))
    survivors = [outcome for outcome in outcomes if outcome.kind == "survivor"]
    for outcome in survivors:
        print(describe(outcome))
    return int(bool(survivors))


def _run(given: argparse.Namespace, out: Path) -> None:
    """Judges what is drawn and was not judged before."""
    import torch

    places = [p for p in list_places(given.target) if not given.spec or p.spec in given.spec]
    drawn = enumerate(draw_mutants(given.count, given.seed, places, given.together))
    known = read_results(out)
    left = {number: draw for number, draw in drawn if not is_of(known.get(number, {}), draw)}
    if stale := known.keys() & left.keys():
        sys.exit(f"{out}: {len(stale)} results are of other kernels or operators: take another file")
    devices = torch.cuda.device_count()
    count = judge_draws(
        left, out=out, workers=given.workers, seconds=given.seconds, heavy=given.heavy, devices=devices
    )
    print(f"{count} of {len(left)} that were left", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
