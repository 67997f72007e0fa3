"""Mutants of attnc's own Python: how much its tests see, as a number for each package.

    python -m tools.mutants.python plan expr --count 200 --seconds 600 --out mutants.jsonl

Cosmic Ray (`pip install cosmic-ray`) has the operators. A mutant is written to a copy of the tree, of which
each worker has one, and judged by the tests of its module, as `python.toml` names them, up to the first that
fails. What only changes annotations, docstrings or options of dataclasses is no mutant.

`--draw` only writes the mutants to the file, so that a machine without Cosmic Ray can run them: the same
command with the file goes on with what has no outcome yet.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from attnc.files import write_text
from tests.processes import environment_of
from tests.test_module_tests import TESTED_ELSEWHERE, own_file
from tools.mutants.operators import Mutant
from tools.mutants.scores import SCORES, describe, join_results, keep_scores, list_table, summarize

ROOT = Path(__file__).parents[2]
SETTINGS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: What a copy of the tree leaves out.
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "_site")
_OPTIONS = ("-x", "-q", "-m", "not nightly", "-p", "no:cacheprovider", "-p", "no:xdist")
#: Names of operators that say the same of many: replacements of one sign by another.
_FAMILY = re.compile(r"core/(\w+?)(_[A-Z]\w*)?$")


def draw_mutants(packages: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    """Draws so many mutants, none twice: packages take turns, then a module, a family of operators and a site
    are drawn, each with the same chance. Fewer where there are no more.
    """
    chance = random.Random(seed)
    seen: set[Mutant] = set()
    misses = 0
    while len(seen) < count and misses < 50:
        for package in packages:
            file = chance.choice(_modules(package))
            sites = _list_sites(file)
            if not sites:
                continue
            mutant = _mutate(file, *chance.choice(sites[chance.choice(sorted(sites))]))
            is_new = mutant is not None and mutant not in seen and len(seen) < count
            misses = 0 if is_new else misses + 1
            if mutant is not None and is_new:
                seen.add(mutant)
                yield mutant


@cache
def _modules(package: str) -> tuple[str, ...]:
    found = sorted((ROOT / "attnc" / package).rglob("*.py"))
    return tuple(path.relative_to(ROOT).as_posix() for path in found if path.name != "__init__.py")


@cache
def _list_sites(file: str) -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Lists operators and the numbers of their places in a module, by families of operators."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast((ROOT / file).read_text(encoding="utf-8"))))
    found: dict[str, list[tuple[str, int]]] = {}
    for name in sorted(operator_names()):
        operator, family = get_operator(name), _FAMILY.match(name)
        if operator.arguments() or family is None or name.removeprefix("core/") in SETTINGS["excluded"]:
            continue
        count = sum(len(list(operator().mutation_positions(node))) for node in nodes)
        found.setdefault(family[1], []).extend((name, number) for number in range(count))
    return {family: tuple(sites) for family, sites in found.items() if sites}


def _mutate(file: str, operator: str, number: int) -> Mutant | None:
    """Returns the change of an operator at one of its places; None where it makes no other program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = (ROOT / file).read_text(encoding="utf-8")
    made = mutate_code(text, get_operator(operator)(), number)
    if made is None or _meaning(made) in (_meaning(text), ""):
        return None
    return _change(file, operator, text, made)


def _change(file: str, operator: str, text: str, made: str) -> Mutant:
    """Returns what was changed, as bytes of the file."""
    old, new = text.encode(), made.encode()
    start = _count_same(old, new)
    same = _count_same(old[start:][::-1], new[start:][::-1])
    line = old[:start].count(b"\n") + 1
    return Mutant(
        operator=operator.removeprefix("core/"),
        file=file,
        function=".".join(_functions_at(text, line)),
        line=line,
        start=start,
        stop=len(old) - same,
        old=old[start : len(old) - same].decode(),
        new=new[start : len(new) - same].decode(),
    )


def _count_same(left: bytes, right: bytes) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _functions_at(text: str, line: int) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            yield node.name


@lru_cache(maxsize=64)
def _meaning(text: str) -> str:
    """Returns the program without annotations, docstrings, options of `dataclass` and `zip`; "" for none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
            case ast.AnnAssign():
                node.annotation = ast.Constant(value=None)
            case ast.Call(func=ast.Name(id="zip")):
                node.keywords = []  # strict, which says what is so
            case ast.ClassDef():
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call):
                        decorator.keywords = []  # frozen, slots: of interest to type checkers
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            body[0] = ast.Pass()
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


# --- tests --------------------------------------------------------------------------------------------------


@cache
def tests_of(file: str) -> tuple[str, ...]:
    """Lists the test files that judge a module, the nearest first."""
    module = Path(file).relative_to("attnc").with_suffix("")
    found = [own_file(str(module)), ROOT / "tests" / f"{TESTED_ELSEWHERE.get(str(module), '')}.py"]
    folders = SETTINGS["tests"][module.parts[0]]
    others = sorted(path for folder in folders for path in (ROOT / folder).rglob("test_*.py"))
    name = f"attnc.{'.'.join(module.parts)}"
    ends = re.compile(rf"\b{re.escape(name)}\b")
    found += sorted(others, key=lambda path: ends.search(path.read_text(encoding="utf-8")) is None)
    kept = dict.fromkeys(path.relative_to(ROOT).as_posix() for path in found if path.is_file())
    return tuple(kept)


@dataclass(slots=True)
class _Durations:
    """How long test files take without a mutant; those that fail there are not asked."""

    known: dict[str, float | None] = field(default_factory=dict)
    locks: dict[str, threading.Lock] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, file: str, folder: Path, number: int) -> float | None:
        with self.lock:
            own = self.locks.setdefault(file, threading.Lock())
        with own:
            if file not in self.known:
                began = time.monotonic()
                passes = _passes(file, folder, number, 10 * SETTINGS["limits"]["seconds"])
                self.known[file] = time.monotonic() - began if passes else None
            return self.known[file]


def _passes(file: str, folder: Path, number: int, seconds: float) -> bool | None:
    """Returns whether the tests of a file pass in a copy of the tree; None where they do not end in time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *_OPTIONS, file],
        cwd=folder,
        env={**environment_of(number, 0), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return None


def judge(mutant: Mutant, folder: Path, number: int, durations: _Durations) -> dict[str, Any]:
    """Returns what became of a mutant in a copy of the tree: which test file failed, or that none did."""
    place, limits = folder / mutant.file, SETTINGS["limits"]
    text, spent = place.read_text(encoding="utf-8"), 0.0
    for count, file in enumerate(tests_of(mutant.file), start=1):
        usual = durations.of(file, folder, number)
        if usual is None:
            continue
        if spent + usual > limits["seconds"] and count > 1:
            break
        try:
            place.write_text(mutant.apply(text), encoding="utf-8")
            passes = _passes(file, folder, number, limits["times"] * usual + 20)
        finally:
            place.write_text(text, encoding="utf-8")
        if not passes:
            return {"outcome": "hung" if passes is None else "killed", "cases": count, "message": file}
        spent += usual
    return {"outcome": "survived", "cases": 0, "message": ""}


# --- a campaign ---------------------------------------------------------------------------------------------


def main() -> int:
    """Runs a campaign and prints its table. Exit status 1 where a mutant survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    packages = sorted(SETTINGS["tests"])
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(packages)}; all if none is named"
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other mutants")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no mutant is begun")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file of mutants, which is gone on with")
    parser.add_argument("--draw", action="store_true", help="write the mutants, and run none")
    parser.add_argument("--keep", metavar="WHERE", help="commit the scores, as of this machine")
    given = parser.parse_args()
    if unknown := set(given.packages) - set(packages):
        parser.error(f"there is no package {unknown.pop()!r}")
    out: Path = given.out or Path(tempfile.mkdtemp(), "mutants.jsonl")
    if not out.is_file():
        lines = (
            json.dumps(_describe(mutant))
            for mutant in draw_mutants(given.packages or packages, given.count, given.seed)
        )
        out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if given.draw:
        return 0
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    run(results, given.workers, time.monotonic() + given.seconds, lambda: _write(out, results))
    outcomes = join_results({n: result for n, result in enumerate(results) if "outcome" in result}, {})
    print("\n".join(list_table(outcomes)))
    if given.keep:
        keep_scores(SCORES, "python", summarize(outcomes, seed=given.seed, where=given.keep))
    survivors = [outcome for outcome in outcomes if outcome.kind == "survivor"]
    print("\n".join(map(describe, survivors)))
    return int(bool(survivors))


def _describe(mutant: Mutant) -> dict[str, Any]:
    package = mutant.file.split("/")[1]
    return {"place": {"target": "python"}, "phase": package, "mutant": asdict(mutant)}


def _write(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(f"{json.dumps(result)}\n" for result in results))


def run(results: Sequence[dict[str, Any]], workers: int, until: float, keep: Callable[[], None]) -> None:
    """Judges the mutants that have no outcome yet, and adds it to them. keep: called after each."""
    durations = _Durations()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        copies: SimpleQueue[tuple[int, Path]] = SimpleQueue()
        for number in range(workers):
            copy = Path(name, str(number))
            shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
            copies.put((number, copy))

        def work(result: dict[str, Any]) -> None:
            if time.monotonic() > until:
                return
            number, copy = copies.get()
            try:
                began = time.monotonic()
                result |= judge(Mutant(**result["mutant"]), copy, number, durations)
                result["seconds"] = round(time.monotonic() - began, 1)
                keep()
                print(result["phase"], result["outcome"], result["message"], file=sys.stderr, flush=True)
            finally:
                copies.put((number, copy))

        list(pool.map(work, [result for result in results if "outcome" not in result]))


if __name__ == "__main__":
    sys.exit(main())
