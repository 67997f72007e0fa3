"""Mutants of attnc's own Python: how much its tests see, as a number for each package.

    python -m tools.mutants.python plan expr --count 200 --seconds 600 --lines lines --out mutants.jsonl

Cosmic Ray (`pip install cosmic-ray`) has the operators. Coverage.py says which tests run a changed line: the
tests of `python.toml` run once for that, and `--lines` names a folder that keeps what was recorded. Those
judge a mutant, and others where they are few, up to the first that fails, in a process forked from one that
has imported PyTorch.

`--draw` only writes the mutants to the file, so that a machine without Cosmic Ray can run them: the same
command with the file goes on with what has no outcome yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from attnc.files import write_text
from tools.mutants.lines import Lines
from tools.mutants.operators import Mutant
from tools.mutants.python_judge import Judges, record_lines, start_hosts
from tools.mutants.python_sample import ROOT, SETTINGS, draw_mutants
from tools.mutants.scores import SCORES, describe, join_results, keep_scores, list_table, summarize

#: Decorators that remember results; and that say which methods others have, of classes that have no objects.
_REMEMBERS = re.compile(r"@(functools\.)?(memo|memo_by_object|cache|lru_cache|_hashed_once)\b")
_ABSTRACT = re.compile(r"@abstractmethod\b")
#: A comparison of what is left of a division with 0, from its sign on as a group.
_REMAINDER = re.compile(rb"% (?:[\w.]+|\([^()]*\)) (== 0(?![.\w]))")


def main() -> int:
    """Runs a campaign and prints its table. Exit status 1 where a mutant survived."""
    given = _parse()
    out: Path = given.out or Path(tempfile.mkdtemp(), "mutants.jsonl")
    if not out.is_file():
        drawn = draw_mutants(given.packages, given.count, given.seed)
        out.write_text("".join(f"{json.dumps(_describe(mutant))}\n" for mutant in drawn), encoding="utf-8")
    if given.draw:
        return 0
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    if given.seconds > 0:
        with tempfile.TemporaryDirectory() as folder:
            packages = sorted({result["phase"] for result in results})
            lines = record_lines(packages, given.lines or Path(folder), given.workers)
            until = time.monotonic() + given.seconds
            run(results, lines, given.workers, until, lambda: _write(out, results))
    judged = {n: result for n, result in enumerate(results) if "outcome" in result}
    outcomes = join_results({n: explain_equal(result) for n, result in judged.items()}, {})
    print("\n".join(list_table(outcomes)))
    if given.keep:
        name, where = given.keep
        keep_scores(SCORES, name, summarize(outcomes, seed=given.seed, where=where))
    survivors = [outcome for outcome in outcomes if outcome.kind == "survivor"]
    print("\n".join(map(describe, survivors)))
    return int(bool(survivors))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    packages = sorted(SETTINGS["tests"])
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(packages)}; all if none is named"
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other mutants")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="after which no mutant is begun; tests that run once before come on top",
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lines", type=Path, help="a folder that keeps which lines each test runs")
    parser.add_argument("--out", type=Path, help="a file of mutants, which is gone on with")
    parser.add_argument("--draw", action="store_true", help="write the mutants, and run none")
    parser.add_argument(
        "--keep", nargs=2, metavar=("NAME", "WHERE"), help="commit the scores, by a name, as of this machine"
    )
    given = parser.parse_args()
    if unknown := set(given.packages) - set(packages):
        parser.error(f"there is no package {unknown.pop()!r}")
    given.packages = given.packages or packages
    return given


def _describe(mutant: Mutant) -> dict[str, Any]:
    package, place = mutant.file.split("/")[1], {"target": "python"}
    return {"place": place, "phase": package, "text": hash_of(mutant.file), "mutant": asdict(mutant)}


@cache
def hash_of(file: str) -> str:
    """Returns what tells the text of a module from others."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def explain_equal(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a survivor that is known to compute the same as equal, with the reason; any other result as it
    is.
    """
    mutant = result["mutant"]
    if result["outcome"] != "survived":
        return result
    known = next((each["why"] for each in SETTINGS["equal"] if _is_of(each, mutant)), None)
    if mutant["operator"] == "RemoveDecorator" and _REMEMBERS.search(mutant["old"]):
        known = "results that were remembered are computed again"
    if mutant["operator"] == "RemoveDecorator" and _ABSTRACT.search(mutant["old"]):
        known = "no object is made of a class that leaves a method to others"
    if (mutant["operator"], mutant["old"], mutant["new"]) == ("ReplaceComparisonOperator", "=", "<"):
        found = _REMAINDER.finditer((ROOT / mutant["file"]).read_bytes())
        if any(match.start(1) == mutant["start"] for match in found):
            known = "what is left of a division by a positive number is not negative"
    return result if known is None else {**result, "outcome": "equal", "message": known}


def _is_of(known: Mapping[str, str], mutant: Mapping[str, Any]) -> bool:
    fields = {name: value for name, value in known.items() if name not in ("why", "within")}
    return all(mutant[name] == value for name, value in fields.items()) and (
        known.get("within", "") in _line_of(mutant["file"], mutant["line"])
    )


def _line_of(file: str, number: int) -> str:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return lines[number - 1] if number <= len(lines) else ""


def _write(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(f"{json.dumps(result)}\n" for result in results))


def run(
    results: Sequence[dict[str, Any]], lines: Lines, workers: int, until: float, keep: Callable[[], None]
) -> None:
    """Judges the mutants that have no outcome yet, and adds it to them. Leaves out those of modules that have
    changed since. keep: called after each.
    """
    left = [result for result in results if "outcome" not in result]
    stale = [result for result in left if result["text"] != hash_of(result["mutant"]["file"])]
    if stale:
        print(f"{len(stale)} of {len(left)} are of modules that have changed", file=sys.stderr, flush=True)
    left = [result for result in left if result not in stale]
    lock = Lock()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        judges = Judges(lines, start_hosts(lines, Path(name), workers))

        def work(result: dict[str, Any]) -> None:
            if time.monotonic() > until:
                return
            try:
                judged = judges.judge(Mutant(**result["mutant"]))
            except ValueError:  # its module has changed meanwhile
                return
            with lock:
                result |= judged
                keep()
            print(result["phase"], judged["outcome"], judged["message"], file=sys.stderr, flush=True)

        try:
            list(pool.map(work, left))
        finally:
            judges.close()


if __name__ == "__main__":
    sys.exit(main())
