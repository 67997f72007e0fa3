"""Mutants of attnc's own Python: which tests judge one, and what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.by_day import each_by_day
from tests.processes import run_program
from tools.mutants import python, python_host, python_judge
from tools.mutants.lines import Lines, keep_sources, move_lines, read_lines
from tools.mutants.operators import Mutant
from tools.mutants.python_host import COLLECTION, answer
from tools.mutants.python_judge import Judges, choose_tests
from tools.mutants.python_sample import ROOT, SETTINGS

FILE = "attnc/plan/width.py"
OWN, OTHER = "tests/plan/test_width.py", "tests/plan/test_sm90_turns.py"
TEXT = (ROOT / FILE).read_text(encoding="utf-8").splitlines()
#: The first line of a function, and the one after its docstring begins.
DEFINED = next(number for number, line in enumerate(TEXT, start=1) if line.startswith("def "))


def mutant_at(line: int) -> Mutant:
    """Returns a change of the first letters of a line that are not blank."""
    old = TEXT[line - 1].split()[0]
    start = len("\n".join([*TEXT[: line - 1], ""]).encode()) + TEXT[line - 1].index(old)
    return Mutant(
        operator="drop",
        file=FILE,
        function="",
        line=line,
        start=start,
        stop=start + len(old),
        old=old,
        new="x",
    )


def body_of(line: int) -> int:
    """Returns the last line of the function that begins here."""
    return next(n for n in range(line + 1, len(TEXT) + 1) if n == len(TEXT) or not TEXT[n].strip()) - 0


def lines_of(**tests: tuple[float, Sequence[int]]) -> Lines:
    """Returns what was recorded of tests, by name: seconds, and the lines that each runs."""
    ids = {name: f"{OWN if name.startswith('own') else OTHER}::{name}" for name in tests}
    tests_of = {
        line: frozenset(ids[name] for name, (_, lines) in tests.items() if line in lines)
        for line in range(1, len(TEXT) + 1)
    }
    seconds = {ids[name]: cost for name, (cost, _) in tests.items()}
    return Lines(tests_of={FILE: tests_of}, tests=seconds, files={OWN: 0.5, OTHER: 0.1})


def names(groups: Sequence[Mapping[str, float]]) -> list[str]:
    return [test.partition("::")[2] for group in groups for test in group]


def test_a_copy_of_the_tree_has_all_that_belongs_to_it() -> None:
    """The list of generated files too, without which tests of them fail."""
    names = {
        path.name
        for folder in ("generated", "templates", "specs", "tests")
        for path in (ROOT / folder).iterdir()
    }
    assert ".attnc-manifest" in names
    assert not python_judge._LEFT_OUT(str(ROOT), sorted(names - {"__pycache__"}))


def test_files_that_are_named_for_a_module_are_there() -> None:
    for module, files in SETTINGS["own"].items():
        assert (ROOT / "attnc" / f"{module}.py").is_file(), module
        assert all((ROOT / file).is_file() for file in files), files
        assert {*files} <= python_judge._own_files(f"attnc/{module}.py")


def test_tests_that_run_a_line_judge_it_those_of_the_module_and_others_in_turn() -> None:
    line = body_of(DEFINED)
    lines = lines_of(
        other=(0.1, [line]), own=(0.2, [line]), own_elsewhere=(0.1, [line + 9]), own_b=(0.1, [line])
    )
    assert names(choose_tests(mutant_at(line), lines)) == ["own_b", "other", "own", "own_elsewhere"]


def test_tests_of_the_module_are_asked_though_none_is_known_to_run_the_line() -> None:
    """What remembers results runs its lines in the first test of a process alone."""
    line = body_of(DEFINED)
    usual = {f"other_{case}": (0.1, [line]) for case in range(20)}
    assert "own_unseen" in names(choose_tests(mutant_at(line), lines_of(**usual, own_unseen=(0.1, []))))


def test_a_test_that_runs_what_few_run_comes_early() -> None:
    """Of the lines of the function: all run the changed one."""
    line = body_of(DEFINED)
    usual = {f"own_{case}": (0.1, [line]) for case in range(20)}
    found = names(choose_tests(mutant_at(line), lines_of(**usual, own_z=(0.3, [line, line - 1]))))
    assert found.index("own_z") == 1


def test_what_runs_as_a_module_is_imported_is_judged_by_its_function_or_by_all_of_it() -> None:
    inside, outside = body_of(DEFINED), len(TEXT)
    lines = lines_of(own_inside=(0.1, [inside]), own_outside=(0.1, [outside]))
    assert names(choose_tests(mutant_at(DEFINED), lines)) == ["own_inside", "own_outside"]
    imported = next(number for number, text in enumerate(TEXT, start=1) if text.startswith("from attnc"))
    assert set(names(choose_tests(mutant_at(imported), lines))) == {"own_inside", "own_outside"}
    first = lines_of(own_inside=(0.1, [inside]), other_imports=(0.1, [imported, DEFINED]))
    assert names(choose_tests(mutant_at(DEFINED), first))[0] == "own_inside"
    assert set(names(choose_tests(mutant_at(imported), first))) == {"own_inside", "other_imports"}


def test_tests_of_the_package_judge_a_line_that_none_is_known_to_run() -> None:
    line = body_of(DEFINED)
    lines = lines_of(own=(0.1, []), other=(0.2, []))
    lines.tests["tests/flex/test_mods.py::test_elsewhere"] = 0.1
    assert names(choose_tests(mutant_at(line), lines)) == ["own", "other"]
    lines.tests["tests/test_build.py::whole"] = 0.3
    assert names(choose_tests(mutant_at(line), lines)) == ["own", "whole", "other"]


def test_signatures_are_looked_at_where_a_line_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS["signatures"], "plan", [OTHER])
    inside = body_of(DEFINED)
    lines = lines_of(own_inside=(0.1, [inside]), other_elsewhere=(0.1, []))
    assert names(choose_tests(mutant_at(DEFINED), lines)) == ["other_elsewhere", "own_inside"]
    assert names(choose_tests(mutant_at(inside), lines)) == ["own_inside", "other_elsewhere"]


def test_no_test_is_asked_beyond_the_budget() -> None:
    line, most = body_of(DEFINED), SETTINGS["limits"]["seconds"]
    lines = lines_of(own=(most - 1, [line]), own_long=(most - 0.9, [line]), other=(0.1, [line]))
    assert names(choose_tests(mutant_at(line), lines)) == ["own", "other"]


def test_no_two_files_take_all_of_the_budget() -> None:
    """Of three, each with cases for all of it, every one is asked."""
    line, most = body_of(DEFINED), SETTINGS["limits"]["seconds"]
    lines = lines_of(**{f"own_{case}": (most / 20, [line]) for case in range(20)})
    files = (OTHER, "tests/plan/test_words.py")
    many = {f"{file}::test_it[{case}]": most / 20 for file in files for case in range(20)}
    lines.tests |= many
    lines.tests_of[FILE][line] |= many.keys()
    groups = choose_tests(mutant_at(line), lines)
    assert sum(groups[0].values()) <= most / 5
    assert {test.partition("::")[0] for group in groups for test in group} == {OWN, *files}


def test_tests_of_other_packages_come_last() -> None:
    line, cheap = body_of(DEFINED), "tests/flex/test_mods.py::test_cheap"
    lines = lines_of(own=(0.3, [line]), other=(0.4, [line]))
    lines.tests[cheap] = 0.01
    lines.tests_of[FILE][line] |= {cheap}
    assert names(choose_tests(mutant_at(line), lines)) == ["own", "other", "test_cheap"]


def test_what_sees_all_of_a_package_judges_its_constants() -> None:
    """Those run as a module is imported, and plans have them whatever else of the module runs."""
    lines = lines_of(own=(0.1, [body_of(DEFINED)]), other=(0.2, []))
    whole = "tests/test_build.py::whole"
    lines.tests[whole] = 0.3
    imported = next(number for number, text in enumerate(TEXT, start=1) if text.startswith("from attnc"))
    assert names(choose_tests(mutant_at(imported), lines))[:2] == ["own", "whole"]


def test_tests_of_the_function_and_the_module_follow_where_few_run_a_line() -> None:
    line, last, limits = body_of(DEFINED), len(TEXT), SETTINGS["limits"]
    few = {f"other_{case}": (0.1, [line]) for case in range(2)}
    many = {f"other_{case}": (0.1, [line]) for case in range(20)}
    near = {"other_near": (0.1, [last]), "other_long": (limits["beyond"] + 1, [last])}
    found = names(choose_tests(mutant_at(line), lines_of(**few, **near)))
    assert found == ["other_0", "other_1", "other_near"]
    assert "other_near" not in names(choose_tests(mutant_at(line), lines_of(**many, **near)))


def test_one_case_of_each_function_comes_before_a_second() -> None:
    line = body_of(DEFINED)
    cases = {f"own_a[{case}]": (0.01, [line]) for case in range(3)}
    lines = lines_of(**cases, own_b=(0.2, [line]))
    assert names(choose_tests(mutant_at(line), lines))[:2] == ["own_a[0]", "own_b"]


class Told:
    """A process whose answers are known: what fails with the mutant, and what fails anyway."""

    def __init__(self, *failing: str, always: Sequence[str] = (), place: str = "") -> None:
        self.failing, self.always, self.place = failing, always, place

    def ask(self, file: str, text: str, groups: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        is_mutant = text != (ROOT / file).read_text(encoding="utf-8")
        for test in names(groups):
            if test in self.always or (is_mutant and test in self.failing):
                place = self.place or next(t for group in groups for t in group if t.endswith(f"::{test}"))
                return {"outcome": "killed", "cases": 1, "message": place, "seconds": 1.0}
        return {"outcome": "survived", "cases": len(groups), "message": "", "seconds": 1.0}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("place", ["", COLLECTION])
def test_what_fails_without_the_mutant_too_has_not_seen_it(place: str) -> None:
    line = body_of(DEFINED)
    lines = lines_of(own=(0.1, [line]), other=(0.2, [line]))
    host: Any = Told(always=["own"], place=place)
    judged = Judges(lines, [host]).judge(mutant_at(line))
    assert (judged["outcome"], judged["seconds"]) == ("survived", 2.0)
    assert [*lines.tests] == [f"{OTHER}::other"]


def test_what_fails_of_the_mutant_alone_has_seen_it() -> None:
    line = body_of(DEFINED)
    host: Any = Told("other")
    judged = Judges(lines_of(own=(0.1, [line]), other=(0.2, [line])), [host]).judge(mutant_at(line))
    assert (judged["outcome"], judged["message"]) == ("killed", f"{OTHER}::other")


@pytest.mark.one_in(3)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "outcome", "place"),
    each_by_day(
        [
            ("x = 2", "killed", "test_small.py::test_x"),
            ("raise ValueError", "killed", COLLECTION),
            ("import os\nos._exit(0)", "killed", COLLECTION),
            ("x = 1", "survived", ""),
            (
                "class X:\n    def __eq__(self, other):\n        while True: pass\nx = X()",
                "hung",
                "test_small.py::test_x",
            ),
        ],
        of=2,
    ),
)
def test_tests_run_in_a_child_which_may_end_or_hang(
    text: str, outcome: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed_by_a_mutant.py").write_text("x = 1")
    (tmp_path / "test_small.py").write_text(
        "from changed_by_a_mutant import x\n\n\ndef test_y():\n    assert x == 3\n\n\n"
        "def test_x():\n    assert x == 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(python_host, "_TEST_SECONDS", 1.0 if outcome == "hung" else 60.0)
    groups = [{"test_small.py::test_x": 0.0}]
    found = answer({"file": "changed_by_a_mutant.py", "text": text, "groups": groups})
    assert (found["outcome"], found["message"]) == (outcome, place)
    assert (tmp_path / "changed_by_a_mutant.py").read_text() == "x = 1"


RECORDED = """
import os, sys
import pytest
os.environ["ATTNC_LINES"] = sys.argv[1]
sys.path.insert(0, sys.argv[2])
options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tools.mutants.lines"]
sys.exit(pytest.main([*options, "-W", "ignore", "--rootdir", ".", "tests"]))
"""


def test_lines_are_recorded_by_test(tmp_path: Path) -> None:
    pytest.importorskip("coverage", reason="of the extra 'mutants', which make installs")
    package, tests, folder = tmp_path / "attnc", tmp_path / "tests", tmp_path / "lines"
    for made in (package, tests, folder):
        made.mkdir()
    (package / "small.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tests / "test_small.py").write_text(
        "import pytest\nimport sys\nsys.path.insert(0, 'attnc')\nfrom small import f\n\n"
        "@pytest.mark.parametrize('x', [0, 1])\ndef test_f(x):\n    assert f(x)\n\n"
        "def test_wrong():\n    assert f(1) == 2\n"
    )
    done = run_program(f"import os; os.chdir({str(tmp_path)!r})\n{RECORDED}", folder, ROOT)
    assert done.returncode == 1, done.stderr
    keep_sources(folder, tmp_path)
    lines = read_lines(folder, tmp_path)
    zero, one = (f"tests/test_small.py::test_f[{x}]" for x in (0, 1))
    assert lines.tests.keys() == {zero, one}
    found = dict(lines.tests_of["attnc/small.py"])
    assert [found[line] for line in (2, 3, 4)] == [{zero, one}, {one}, {zero}]
    assert lines.files.keys() == {"tests/test_small.py"}
    lines.forget({one})
    assert lines.tests.keys() == {zero}
    assert lines.tests_of["attnc/small.py"][3] == set()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    (moved / "attnc/small.py").write_text("# new\ndef f(x):\n    if x:\n        return 1\n    return 2\n")
    assert read_lines(moved / "lines", moved).tests_of["attnc/small.py"] == {
        line + 1: tests for line, tests in found.items() if tests
    }
    (moved / "tests/test_small.py").unlink()
    assert not read_lines(moved / "lines", moved).tests


def test_tests_follow_the_lines_of_a_module_that_has_changed() -> None:
    one, two = frozenset({"one"}), frozenset({"two"})
    moved = move_lines({1: one, 3: two}, "a\nb\nc", "a\nnew\nb\nd\n")
    assert moved == {1: one, 2: one, 4: two}


def test_mutants_of_modules_that_have_changed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = body_of(DEFINED)
    host: Any = Told("own")
    monkeypatch.setattr(python, "start_hosts", lambda *_: [host])
    results: list[dict[str, Any]] = [
        {"phase": "plan", "text": text, "mutant": asdict(mutant_at(line))}
        for text in (python.hash_of(FILE), "old")
    ]
    python.run(results, lines_of(own=(0.1, [line])), 1, float("inf"), lambda: None)
    assert [result.get("outcome") for result in results] == ["killed", None]
    assert "1 of 2 are of modules that have changed" in capsys.readouterr().err


def survivor(**changes: str | int) -> dict[str, Any]:
    mutant = {**asdict(mutant_at(DEFINED)), "operator": "ReplaceOrWithAnd", **changes}
    return {"outcome": "survived", "message": "", "mutant": mutant}


def test_survivors_that_compute_the_same_are_listed_with_the_reason() -> None:
    known = next(iter(SETTINGS["equal"]))
    same = python.explain_equal(survivor(**{name: value for name, value in known.items() if name != "why"}))
    assert (same["outcome"], same["message"]) == ("equal", known["why"])
    for old in ("\n    # --- what others have\n\n    @abstractmethod\n", "\n\n@memo_by_object\n"):
        assert python.explain_equal(survivor(operator="RemoveDecorator", old=old))["outcome"] == "equal"
    slower = python.explain_equal(survivor(operator="RemoveDecorator", old="@memo\n"))
    assert slower["outcome"] == "equal"
    assert python.explain_equal(survivor(operator="RemoveDecorator", old="@functools.cache\n")) == {
        **survivor(operator="RemoveDecorator", old="@functools.cache\n"),
        "outcome": "equal",
        "message": slower["message"],
    }
    for other in (survivor(), survivor(operator="RemoveDecorator", old="@property\n")):
        assert python.explain_equal(other) == other
    bounded = next(known for known in SETTINGS["equal"] if known.get("within") == "_SIZES = (")
    file, lines = bounded["file"], (ROOT / bounded["file"]).read_text(encoding="utf-8").splitlines()
    number = {"file": file, "function": "", "operator": "NumberReplacer"}
    at = next(at for at, line in enumerate(lines, 1) if "_SIZES = (" in line)
    assert python.explain_equal(survivor(**number, line=at))["outcome"] == "equal"
    assert python.explain_equal(survivor(**number, line=at - 1))["outcome"] == "survived"
    for file in ("attnc/support/cuda_call.py", "attnc/support/hopper_call.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        for match in re.finditer("==", text):
            start = len(text[: match.start()].encode())
            compares = {"file": file, "operator": "ReplaceComparisonOperator", "old": "=", "new": "<"}
            rest = survivor(**compares, start=start, stop=start + 1)
            before = text[: match.start()].rpartition("\n")[2].rpartition(" and ")[2]
            is_rest = " % " in before and text[match.end() :].startswith(" 0")
            assert (python.explain_equal(rest)["outcome"] == "equal") == is_rest, before
    killed = {**survivor(operator="RemoveDecorator", old="@memo\n"), "outcome": "killed"}
    assert python.explain_equal(killed) == killed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("known", SETTINGS["equal"], ids=lambda known: " ".join(list(known.values())[:-1]))
def test_what_is_said_to_compute_the_same_is_there(known: Mapping[str, str]) -> None:
    files = [known["file"]] if "file" in known else (ROOT / "attnc").rglob("*.py")
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    assert known.get("old", "").strip() in text
    assert known.get("within", "") in text
    name = known.get("function", "").rpartition(".")[2]
    assert not name or re.search(rf"def {name}\(", text)
    assert len(known["why"]) > 20
