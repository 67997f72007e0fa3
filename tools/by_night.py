"""Which test functions may leave the day, by a record of the lines that each test runs and of what it takes.

    ATTNC_LINES=FOLDER python -m pytest -n 2 -p tools.mutants.lines
    python -m tools.by_night FOLDER

writes lines for `tests/by_night.txt`, by the rule that stands in `tests/by_day.py`. What has to stay whatever
it takes is left out by hand: checks of the committed tree, and tests of a command, a door or a golden.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.by_day import read_listed
from tools.mutants.lines import SOURCES, Lines, keep_sources, read_lines

ROOT = Path(__file__).parents[1]
#: Processor seconds that are worth a line of the list.
LEAST = 0.1
#: Of the functions of a file that many stay.
STAYING = 0.4
_TARGETS = re.compile(r"(?<![\w.])(?:triton|cuda[._]sm_80|cuda[._]sm_90a)(?!\w)")


def propose(lines: Lines, *, least: float = LEAST) -> dict[str, float]:
    """Returns functions that may leave the day, those first that take most, with what their tests take. Tests
    that are left run every line of attnc, two in five functions of each file, and each of its targets.
    """
    tests = defaultdict[str, list[str]](list)
    for test in lines.tests:
        tests[_function(test)].append(test)
    seconds = {name: sum(lines.tests[test] for test in each) for name, each in tests.items()}
    ran = _list_ran(lines)
    runners = Counter(number for numbers in ran.values() for number in numbers.elements())
    left = Counter(_file(name) for name in tests)
    of_file = left + Counter(_file(name) for name in read_listed() if name not in tests)
    targets = Counter((_file(name), target) for name in tests for target in _targets(tests[name]))
    found: dict[str, float] = {}
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        file, own = _file(name), _targets(tests[name])
        if seconds[name] < least:
            break
        if left[file] - 1 < STAYING * of_file[file] or any(targets[file, target] == 1 for target in own):
            continue
        if any(runners[number] == count for number, count in ran.get(name, Counter[int]()).items()):
            continue
        found[name] = seconds[name]
        left[file] -= 1
        targets.subtract((file, target) for target in own)
        runners.subtract(ran.get(name, Counter[int]()))
    return found


def _list_ran(lines: Lines) -> Mapping[str, Counter[int]]:
    """For each function the lines that its tests run, and how many of them run each. Lines that the same
    tests run are one number.
    """
    ran = defaultdict[str, Counter[int]](Counter)
    for number, tests in enumerate({tests for each in lines.tests_of.values() for tests in each.values()}):
        for test in tests:
            ran[_function(test)][number] += 1
    return ran


def _function(test: str) -> str:
    return test.partition("[")[0]


def _file(function: str) -> str:
    return function.partition("::")[0]


def _targets(tests: Iterable[str]) -> set[str]:
    return {target for test in tests for target in _TARGETS.findall(test.partition("[")[2])}


def main(folder: str) -> None:
    if not Path(folder, SOURCES).is_file():
        keep_sources(Path(folder), ROOT)
    found = propose(read_lines(Path(folder), ROOT))
    for name in sorted(found):
        print(name)
    print(f"# {len(found)} functions, {sum(found.values()):.0f} processor seconds", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
