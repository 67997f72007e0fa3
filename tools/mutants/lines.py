"""Which lines of attnc each test runs, and what each costs: by Coverage.py, with a context for each test.

As a plugin of pytest (`-p tools.mutants.lines`) this module writes two files to the folder that the variable
`ATTNC_LINES` names, for each process of pytest-xdist: a database of Coverage.py, whose contexts are the ids
of tests, and the processor seconds of tests and of the collection of their files. Beside them `keep_sources`
writes the text of the modules: where one has changed since, `read_lines` finds its lines by what has not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from coverage import Coverage

FOLDER = "ATTNC_LINES"
#: The file of the folder that has the text of modules.
SOURCES = "sources.json"
T = TypeVar("T")


@dataclass(slots=True)
class Lines:
    """Which tests run each line, and processor seconds. Lines that run while modules are imported, or tests
    collected, belong to no test.
    """

    #: Path of a module from the root of the tree, then line: ids of tests.
    tests_of: dict[str, dict[int, frozenset[str]]] = field(default_factory=dict)
    #: Seconds of each test that passes, by id.
    tests: dict[str, float] = field(default_factory=dict)
    #: Seconds that the collection of each test file takes, which include its imports.
    files: dict[str, float] = field(default_factory=dict)

    def forget(self, forgotten: Collection[str]) -> None:
        """Takes out tests."""
        for test in forgotten:
            self.tests.pop(test, None)
        for lines in self.tests_of.values():
            lines.update({line: tests.difference(forgotten) for line, tests in lines.items()})


def keep_sources(folder: Path, root: Path) -> None:
    """Writes the root of the tree that the tests ran in, and the text of its modules, to the folder."""
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / "attnc").rglob("*.py"))
    }
    said = {"root": str(root), "texts": texts}
    (folder / SOURCES).write_text(json.dumps(said), encoding="utf-8")


def read_lines(folder: Path, root: Path) -> Lines:
    """Reads what was written to a folder, for the tree of this root. Tests of files that are gone are left
    out.
    """
    sources = json.loads((folder / SOURCES).read_text(encoding="utf-8"))
    lines = _read_recorded(folder, Path(sources["root"]))
    lines.files = {file: seconds for file, seconds in lines.files.items() if (root / file).is_file()}
    lines.forget([test for test in lines.tests if test.partition("::")[0] not in lines.files])
    for file, text in sources["texts"].items():
        now = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
        if now != text and file in lines.tests_of:
            lines.tests_of[file] = move_lines(lines.tests_of[file], text, now)
    return lines


def move_lines(tests_of: Mapping[int, frozenset[str]], old: str, new: str) -> dict[int, frozenset[str]]:
    """Returns the tests that run each line of a changed text: of what is as it was, the same; of new lines,
    those that ran what stood there before.
    """
    before, after = old.splitlines(), new.splitlines()
    found = {}
    for tag, first, stop, to, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        ran = frozenset[str]().union(*(tests_of.get(line + 1, ()) for line in range(max(first - 1, 0), stop)))
        for line in range(to, end):
            found[line + 1] = tests_of.get(first + line - to + 1, frozenset()) if tag == "equal" else ran
    return {line: tests for line, tests in found.items() if tests}


def _read_recorded(folder: Path, root: Path) -> Lines:
    """Reads what the plugin has written. root: of the tree that the tests ran in."""
    from coverage import CoverageData

    found, failed = Lines(), set[str]()
    for path in sorted(set(folder.glob("*.json")) - {folder / SOURCES}):
        written = json.loads(path.read_text(encoding="utf-8"))
        found.tests |= written["tests"]
        failed |= set(written["failed"])
        for file, seconds in written["files"].items():  # a process that imported much before says less
            found.files[file] = max(seconds, found.files.get(file, 0.0))
    found.tests = {test: seconds for test, seconds in found.tests.items() if test not in failed}
    tests: dict[str, dict[int, set[str]]] = {}
    for path in sorted(folder.glob("*.coverage")):
        data = CoverageData(basename=str(path))
        data.read()
        for measured in data.measured_files():
            lines = tests.setdefault(Path(measured).relative_to(root).as_posix(), {})
            for line, contexts in data.contexts_by_lineno(measured).items():
                lines.setdefault(line, set()).update(test for test in contexts if test in found.tests)
    found.tests_of = {
        file: {line: frozenset(ids) for line, ids in lines.items()} for file, lines in tests.items()
    }
    return found


def count_seconds() -> float:
    """Returns the processor seconds of this process, and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class _Recorder:
    """Follows a session of pytest."""

    def __init__(self, coverage: Coverage, path: Path) -> None:
        self.coverage, self.path = coverage, path
        self.files: dict[str, float] = {}
        self.tests: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, T, T]:
        began = count_seconds()
        report = yield
        if isinstance(collector, pytest.Module):
            self.files[collector.nodeid] = round(count_seconds() - began, 3)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, T, T]:
        began = count_seconds()
        self.coverage.switch_context(item.nodeid)
        done = yield
        self.coverage.switch_context("")
        self.tests[item.nodeid] = round(count_seconds() - began, 3)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        found = {"files": self.files, "tests": self.tests, "failed": sorted(self.failed)}
        self.path.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to record, except in a process that only hands out tests."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if FOLDER not in os.environ or (getattr(config.option, "numprocesses", None) and not worker):
        return
    from coverage import Coverage

    path = Path(os.environ[FOLDER], f"{worker or 'one'}.coverage")
    source = str(config.rootpath / "attnc")
    coverage = Coverage(data_file=str(path), source=[source], config_file=False, messages=False)
    coverage.start()
    config.pluginmanager.register(_Recorder(coverage, path))
