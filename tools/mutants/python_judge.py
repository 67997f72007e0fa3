"""Which tests judge a mutant of Python, in which order, and the processes that run them.

Tests that run a changed line judge it: in turn one of the module's own test file, one that runs lines which
few run, and the cheapest; others where they are few. A line that runs while its module is imported is judged
by tests of signatures, and by those that run the function it belongs to, or else any line of the module.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from tests.processes import environment_of
from tests.test_module_tests import TESTED_ELSEWHERE, own_file
from tools.mutants.lines import FOLDER, Lines, keep_sources, read_lines
from tools.mutants.operators import Mutant
from tools.mutants.python_host import COLLECTION
from tools.mutants.python_sample import ROOT, SETTINGS

#: Tests and the processor seconds that each usually takes.
Tests: TypeAlias = Mapping[str, float]
#: How many test files the groups of tests of a mutant come from, which run in turn until one fails, and the
#: share of the seconds left that a group may take: all cases of two files would leave nothing to others.
_GROUPS = ((2, 0.2), (8, 0.5), (1000, 1.0))
#: Tests that run a changed line, of which others are asked too if there are no more.
_FEW = 12
#: With this variable Python keeps no compiled form of what it imports.
_NOTHING_KEPT = "PYTHONDONTWRITEBYTECODE"
#: What a copy of the tree leaves out: nothing that belongs to it, such as lists of files that are generated.
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".hypothesis", ".*_cache", ".gpu*", "__pycache__", "*.egg-info", "build", "_site"
)


def record_lines(packages: Sequence[str], folder: Path, workers: int) -> Lines:
    """Runs the tests of packages once, by so many processes, and reads which lines each runs; what a folder
    holds of that is read, and not recorded again.
    """
    if not any(folder.glob("*.json")):
        folder.mkdir(parents=True, exist_ok=True)
        tests = sorted({place for package in packages for place in SETTINGS["tests"][package]})
        options = ("-q", "-n", str(workers), "--dist", "worksteal", "-p", "tools.mutants.lines")
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env={**_environment(0), FOLDER: str(folder)},
            stdout=subprocess.DEVNULL,
        )
        keep_sources(folder, ROOT)
    return read_lines(folder, ROOT)


def choose_tests(mutant: Mutant, lines: Lines) -> list[dict[str, float]]:
    """Returns groups of tests, in the order in which they run: together they take no more processor seconds
    than the budget.
    """
    left, beyond = SETTINGS["limits"]["seconds"], SETTINGS["limits"]["beyond"]
    groups, files = list[dict[str, float]](), set[str]()
    for found in _tests_at(mutant, lines):
        ranked = _rank(mutant, found, lines)
        for most, share in _GROUPS:
            group: dict[str, float] = {}
            room = share * left
            for test in tuple(ranked):
                file = test.partition("::")[0]
                costs = lines.tests[test] + (0.0 if file in files else lines.files.get(file, 1.0))
                if costs > left:
                    del ranked[test]
                elif (file in files or len(files) < most) and (costs <= room or not group):
                    left -= costs
                    room -= costs
                    files.add(file)
                    group[test] = lines.tests[test]
                    del ranked[test]
            if group:
                groups.append(group)
        left = min(left, beyond)
    return groups


def _tests_at(mutant: Mutant, lines: Lines) -> Iterator[frozenset[str]]:
    """Yields tests in turn: those that run a changed line, or where there are none its function or module,
    and those of the module's own file; then, where they are few, others of the function, the module and the
    package. What remembers results runs its lines in the first test of a process alone, what tests compute as
    they are collected in none, and copies of the support package elsewhere. Of a line that runs as its module
    is imported, tests of signatures come first, and all others follow: those that see all of the package too,
    whose plans have a constant without running a line of its module.
    """
    known, asked = lines.tests_of.get(mutant.file, {}), frozenset[str]()
    package = mutant.file.split("/")[1]
    spans, is_imported = _spans(mutant)
    if is_imported:
        files = SETTINGS["signatures"].get(package, ())
        asked |= frozenset(test for test in lines.tests if test.partition("::")[0] in files)
        yield from [asked] * bool(asked)
    own = _own_files(mutant.file)
    near = own | {*SETTINGS["whole"].get(package, ())} if is_imported else own
    of_module = frozenset(test for test in lines.tests if test.partition("::")[0] in near)
    for span in spans:
        found = frozenset().union(*(tests for line, tests in known.items() if line in span)) - asked
        if found:
            found |= of_module - asked
            yield found
            asked |= found
        if len(asked) > _FEW and not is_imported:
            return
    places = tuple(SETTINGS["tests"][package])
    yield frozenset(test for test in lines.tests if test.startswith(places)) - asked


def _spans(mutant: Mutant) -> tuple[list[range], bool]:
    """Returns lines of a mutant: of the innermost statement, of the function around it, of the module; and
    whether it runs as its module is imported. Then no statement is among them: a test that runs it has only
    imported it first.
    """
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    last = mutant.line + mutant.old.count("\n")
    around = [
        node
        for node in ast.walk(_parse(text))
        if isinstance(node, ast.stmt) and _first(node) <= mutant.line and last <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: (node.end_lineno or 0) - _first(node))
    functions = [node for node in around if isinstance(node, ast.FunctionDef)]
    is_imported = all(mutant.line < node.body[0].lineno for node in functions)
    spans = []
    if not is_imported:
        body = getattr(around[0], "body", None)
        end = body[0].lineno - 1 if body else around[0].end_lineno or 0
        spans += [range(mutant.line, last + 1), range(_first(around[0]), end + 1)]
    for node in around:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            spans.append(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return [*spans, range(1, text.count("\n") + 2)], is_imported


def _first(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _rank(mutant: Mutant, tests: frozenset[str], lines: Lines) -> dict[str, None]:
    """Sorts tests. In turn comes one of the module's own file, one of those that see all of the package, one
    that runs lines of the function which few run, for what it costs, and one of the others; tests of other
    packages come last. Of each kind but the third those that run the function come first, then the cheapest,
    and one case of each test before a second one.
    """
    package = mutant.file.split("/")[1]
    own, whole = _own_files(mutant.file), {*SETTINGS["whole"].get(package, ())}
    places, rarity = tuple(SETTINGS["tests"][package]), _rarity(mutant, tests, lines)
    turns, key = dict[str, int](), dict[str, tuple[bool, int, bool, float, str]]()
    for test in sorted(tests, key=lambda test: (lines.tests[test], test)):
        function = test.partition("[")[0]
        turn = turns[function] = turns.get(function, -1) + 1
        key[test] = (not test.startswith(places), turn, test not in rarity, _cost(test, lines), test)

    def among(files: Collection[str]) -> list[str]:
        return sorted((test for test in tests if test.partition("::")[0] in files), key=key.__getitem__)

    orders = (
        among(own),
        among(whole - own),
        sorted(rarity, key=lambda test: (key[test][0], -rarity[test] / _cost(test, lines), test)),
        among({test.partition("::")[0] for test in tests} - own - whole),
    )
    return dict.fromkeys(test for turn in zip_longest(*orders) for test in turn if test is not None)


@cache
def _own_files(file: str) -> frozenset[str]:
    """Returns the test files of a module, those that exist or not."""
    module = str(Path(file).relative_to("attnc").with_suffix(""))
    own = (own_file(module), ROOT / "tests" / f"{TESTED_ELSEWHERE.get(module, '')}.py")
    named = SETTINGS["own"].get(module, ())
    return frozenset(path.relative_to(ROOT).as_posix() for path in own).union(named)


def _cost(test: str, lines: Lines) -> float:
    return max(lines.tests[test] + lines.files.get(test.partition("::")[0], 1.0), 1e-3)


def _rarity(mutant: Mutant, tests: frozenset[str], lines: Lines) -> dict[str, float]:
    """Says of tests how much they run of the function of a mutant that others do not: each line counts as
    one, shared by all tests that run it.
    """
    spans, is_imported = _spans(mutant)
    known, found = lines.tests_of.get(mutant.file, {}), dict[str, float]()
    for line in spans[0 if is_imported else 2]:
        ran = known.get(line, frozenset())
        for test in ran & tests:
            found[test] = found.get(test, 0.0) + 1 / len(ran)
    return found


class Judges:
    """Processes that judge mutants, each in a copy of the tree. A test that fails without the mutant too is
    asked no more.
    """

    def __init__(self, lines: Lines, hosts: Sequence[Host]) -> None:
        self.lines, self.idle, self.lock = lines, [*hosts], threading.Lock()
        self.trusted = set[str]()

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """Returns what became of a mutant: at which test it was seen, or that it was not."""
        with self.lock:
            host = self.idle.pop()
        try:
            text = mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8"))
            seconds = 0.0
            while True:
                with self.lock:  # others may forget tests meanwhile
                    groups = choose_tests(mutant, self.lines)
                answer = host.ask(mutant.file, text, groups)
                seconds += answer["seconds"]
                asked = groups[answer["cases"] - 1] if groups else {}
                is_seen = answer["outcome"] != "survived"
                if not is_seen or self._trusts(answer["message"], asked, host, mutant.file):
                    return {**answer, "seconds": round(seconds, 1)}
        finally:
            with self.lock:
                self.idle.append(host)

    def close(self) -> None:
        """Ends the processes."""
        for host in self.idle:
            host.close()

    def _trusts(self, place: str, asked: Tests, host: Host, file: str) -> bool:
        """Returns whether what failed at a test, or as the tests asked were collected, passes without the
        mutant; forgets the tests that do not.
        """
        doubted: dict[str, list[str]] = {}
        for test in asked if place == COLLECTION else (place,):
            key = test.partition("::")[0] if place == COLLECTION else test
            if key not in self.trusted and test in self.lines.tests:
                doubted.setdefault(key, []).append(test)
        text = (ROOT / file).read_text(encoding="utf-8")
        for key, tests in [*doubted.items()]:
            alone = {tests[0]: self.lines.tests[tests[0]]}
            passes = host.ask(file, text, [alone])["outcome"] == "survived"
            with self.lock:
                if passes:
                    self.trusted.add(key)
                    del doubted[key]
                else:
                    self.lines.forget(tests)
        return not doubted


def start_hosts(lines: Lines, folder: Path, workers: int) -> list[Host]:
    """Starts so many processes, each in a copy of the tree below a folder."""
    _prepare_copy(folder / "0", sorted(lines.files), workers)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda number: shutil.copytree(folder / "0", folder / str(number)), range(1, workers)))
    return [Host(folder / str(number), number) for number in range(workers)]


def _prepare_copy(copy: Path, files: Sequence[str], workers: int) -> None:
    """Copies the tree, with compiled forms of its modules and of what pytest makes of test files, by so many
    processes. Its text decides whether a compiled form is of a module, not its size and the clock. Test files
    that cannot be collected have none.
    """
    shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
    compiling = ("-m", "compileall", "-q", "-j", str(workers), "--invalidation-mode", "checked-hash")
    collecting = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    environment = {name: value for name, value in _environment(0).items() if name != _NOTHING_KEPT}

    def run(command: Sequence[str], *, must_pass: bool = False) -> None:
        subprocess.run(
            [sys.executable, *command], cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=must_pass
        )

    run((*compiling, "attnc", "tests", "tools"), must_pass=True)
    shares = [files[first::workers] for first in range(min(workers, len(files)))]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, ((*collecting, *share) for share in shares)))


def _environment(number: int) -> dict[str, str]:
    return {**environment_of(number, 0), "CUDA_VISIBLE_DEVICES": ""}


class Host:
    """A process of `python_host` in a copy of the tree."""

    def __init__(self, copy: Path, number: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.python_host"],
            cwd=copy,
            env={**_environment(number), _NOTHING_KEPT: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if "ATTNC_MUTANTS_ERRORS" in os.environ else subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def ask(self, file: str, text: str, groups: Sequence[Tests]) -> dict[str, Any]:
        """Returns what becomes of groups of tests where a file has another text."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"file": file, "text": text, "groups": groups}) + "\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    def close(self) -> None:
        """Ends the process, and what it runs."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
