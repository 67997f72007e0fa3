"""Every planted bug is caught: by the case that is kept for it, and every night by searches from scratch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import replace

import pytest

from attnc.verify.case import Case
from attnc.verify.properties import rule_names
from attnc.verify.simt import available
from tests.planted.bug import plant
from tests.planted.hunting import count_configs, files_with, hunt, judge_clean, large_case, shows, verify
from tests.planted.registry import BUGS, PARTS
from tests.planted.search import CASES, FOUND, read
from tests.processes import run_program

NEEDS_GXX = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
KEPT, FOUND_BY = read(CASES), read(FOUND)
#: What shows a bug whose kernel may do anything, and a search for it in a process of its own.
ENDED = "a signal ends the process"
SEARCH = """
import sys
from attnc.verify.interpreter import ensure_interpreter
ensure_interpreter()
from tests.planted.hunting import verify
from tests.planted.registry import BUGS
sys.exit(verify(BUGS[sys.argv[1]]).case is None)
"""
#: By target, one in how many bugs of a part runs by day.
SHARES = {"triton": 2, "projection": 1, "cuda.sm_80": 3, "cuda.sm_90a": 8}
#: How parts end of which one bug runs by day: tests of the same walks do.
FEW_BY_DAY = "list walks"
#: Whose cases run lines that no others of the day run.
ALSO_BY_DAY = {
    "triton layouts: gradients prepared without dlse",
    "hopper backward: every kv tile the first to add",
    "trees: the first words of a row for every tile",
    "cuda forward: dropout draws the same pair twice",
}


def choose_by_day() -> set[str]:
    """The bugs of the day, more than 260: of each part one in so many, those first whose cases are small and
    ask one kernel. On a CPU a case of Hopper's kernels takes four times as long as one of Triton's.
    """
    found = set(ALSO_BY_DAY)
    for part, bugs in PARTS.items():
        names = [name for name in (f"{part}: {bug.name}" for bug in bugs) if name in KEPT]
        of = len(bugs) if part.endswith(FEW_BY_DAY) else max((SHARES[bug.target] for bug in bugs), default=1)
        found.update(sorted(names, key=_work)[: -(-len(names) // of)])
    return found


def _work(name: str) -> tuple[bool, int]:
    """Whether a case asks kernels of gradients, and the product of its sizes."""
    bug, kept = BUGS[name], KEPT[name]
    asks_gradients = bug.phase == "backward" or bug.file not in ("", "host") or kept["by"] == "gradients"
    return asks_gradients, math.prod(max(size, 1) for size in kept["case"].get("dims", {}).values())


def each(names: list[str], *, of: int = 1, chosen: Collection[str] = ()) -> list[object]:
    """A parameter for each bug, those that are chosen or one in `of` of them by day."""
    return [
        pytest.param(
            name,
            id=name,
            marks=[
                *([NEEDS_GXX] if BUGS[name].target.startswith("cuda.") else []),
                *([pytest.mark.nightly] if (name not in chosen if chosen else number % of) else []),
            ],
        )
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_every_bug_has_its_place(part: str) -> None:
    """Says in seconds what the searches would in minutes."""
    assert all(files_with(bug) for bug in PARTS[part])


@pytest.mark.slow
def test_kept_cases_run_configs_that_exist() -> None:
    """A plan that leaves out a config says by day which cases ran it."""
    configs = {name: kept["case"].get("config", 0) for name, kept in KEPT.items() if name in BUGS}
    late = {name: config for name, config in configs.items() if config > 0}
    assert [name for name, config in late.items() if config >= count_configs(BUGS[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", each([name for name in BUGS if name in KEPT], chosen=choose_by_day()))
def test_the_case_that_is_kept_shows_the_bug(name: str) -> None:
    case = Case.from_json(json.dumps(KEPT[name]["case"]))
    assert shows(BUGS[name], case, KEPT[name]["by"], _rule(name))


def _rule(name: str) -> str:
    """The rule that the bug breaks, by its name in what was said of it."""
    found: str = FOUND_BY[name]["sign"]
    return found.partition(":")[0] if KEPT[name]["by"] == "rules" else ""


def test_kept_cases_break_rules_that_there_are() -> None:
    """What is judged by another name breaks nothing, whatever the bug."""
    assert {_rule(name) for name, line in KEPT.items() if line["by"] == "rules"} <= rule_names()


def first_of_each_kernel() -> set[str]:
    """A bug for each kernel and way of judging that bugs are shown by; what a call launches is asked of
    kernels without a bug in `tests.verify.test_calls`.
    """
    found = {
        (BUGS[name].attention, BUGS[name].target, line["by"]): name
        for name, line in reversed(KEPT.items())
        if line["by"] != "calls"
    }
    return set(found.values())


FIRST = first_of_each_kernel()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *each([name for name in KEPT if name in FIRST], of=14),
        *(
            pytest.param(name, id=name, marks=(pytest.mark.nightly, NEEDS_GXX))
            for name in KEPT
            if name not in FIRST
        ),
    ],
)
def test_the_case_that_is_kept_passes_without_the_bug(name: str) -> None:
    """So what it shows is the bug. By day one case for every fourteenth kernel: other tests run them all."""
    case = Case.from_json(json.dumps(KEPT[name]["case"]))
    verdict = judge_clean(BUGS[name], case, KEPT[name]["by"], _rule(name))
    assert verdict.ok, verdict.message


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    each(
        [name for name, line in FOUND_BY.items() if line is not None and line["by"] in ("verify", "search")]
    ),
)
def test_a_search_from_scratch_finds_the_bug(name: str) -> None:
    """By the means that the record names. A kernel that writes anywhere may end its process, as it may that
    of `attnc verify`, which says so.
    """
    if FOUND_BY[name]["sign"] == ENDED:
        assert run_program(SEARCH, name).returncode <= 0
        return
    found = verify(BUGS[name]) if FOUND_BY[name]["by"] == "verify" else hunt(BUGS[name])
    assert found.case is not None


def test_more_than_260_bugs_are_shown_by_day() -> None:
    """Some of each part."""
    chosen = choose_by_day()
    assert len(chosen) > 260
    assert {name.partition(": ")[0] for name in chosen} == {
        part for part, bugs in PARTS.items() if any(f"{part}: {bug.name}" in KEPT for bug in bugs)
    }


def test_names_are_unique() -> None:
    assert len(BUGS) == sum(len(bugs) for bugs in PARTS.values()) > 300


def test_the_record_speaks_of_every_bug() -> None:
    assert FOUND_BY.keys() == BUGS.keys(), "run: python -m tests.planted.search --only-new"
    assert KEPT.keys() == {
        name for name, line in FOUND_BY.items() if line is not None and line["by"] != "large"
    }


@pytest.mark.parametrize(
    "name", each([name for name, line in FOUND_BY.items() if line is not None and line["by"] == "large"])
)
def test_a_large_case_reaches_the_bug(name: str) -> None:
    """It is as many heads as no kernel runs through on a CPU; tests/gpu/test_planted.py does."""
    case = large_case(BUGS[name], FOUND_BY[name]["dims"])
    assert case.dims["Hkv"] > 1 << 16
    assert case.lengths == "full"


def test_anchors_must_match_once() -> None:
    bug = BUGS["triton forward: sum not rescaled"]
    (patched,) = files_with(bug).values()
    with pytest.raises(ValueError, match="the anchor occurs 0 times: 'l_new = l"):
        plant(patched, bug)
    with pytest.raises(ValueError, match=r"the anchor occurs \d\d+ times: 'tl'"):
        plant(patched, replace(bug, anchor="tl"))
