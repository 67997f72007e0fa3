"""A process that runs tests in children, which it forks: imports of PyTorch and others take seconds, a fork
milliseconds. A child imports attnc anew, and so sees what was changed.

It reads requests, one a line: a file, its text, and groups of tests that run until one fails. Tests are
limited in processor seconds, which other work on the machine does not use up, and no clock decides.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.mutants.waiting import GLANCE, Watch

#: What tests and attnc import of others, and neither Triton's nor attnc's own.
_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.nn.attention.flex_attention",
    "numpy",
    "hypothesis.strategies",
    "jinja2",
    "lark",
    "pytest",
    "rich.console",
    "typer.testing",
    "yaml",
)
#: Plugins of pytest are among them.
_IGNORED = "ignore::pytest.PytestAssertRewriteWarning"
#: Processor seconds that imports may take; and a test, beyond so many times what it usually takes.
_IMPORT_SECONDS, _TEST_SECONDS, _TIMES = 60.0, 5.0, 5.0
#: Processor seconds that a child and the processes below it may take in all: many times the budget of tests.
_SECONDS = 300.0
#: Where tests stop that were not collected.
COLLECTION = "collection"
#: The last word of a child whose tests pass, which no change of attnc says.
_PASSED = "passed"
#: Bytes that a child may have: a number that was changed may be the size of an array.
_MEMORY = 12 << 30


def main() -> None:
    """Answers each request by a line: what became of it, after which test, and processor seconds."""
    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    requests = os.fdopen(os.dup(0))
    os.dup2(null, 0)
    for name in _IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    for line in requests:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs groups of tests on a changed file, up to the first that fails."""
    place = Path(request["file"])
    before = place.read_bytes()
    began = _count_seconds()
    try:
        place.write_text(request["text"], encoding="utf-8")
        outcome, message, count = run_tests(request["groups"])
    finally:
        place.write_bytes(before)
    seconds = round(_count_seconds() - began, 2)
    return {"outcome": outcome, "cases": count, "message": message, "seconds": seconds}


def _count_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_tests(groups: Sequence[Mapping[str, float]]) -> tuple[str, str, int]:
    """Runs groups of tests in a child, given the processor seconds that each test usually takes. Returns what
    became of them: `survived` where all pass, and else `killed` or `hung`, with the test at which they
    stopped; and how many groups ran.
    """
    if not groups:
        return "survived", "", 0
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_run_in_child(groups, writing))
    os.close(writing)
    last, watch, is_ended = b"", Watch(child, _SECONDS), False
    while not is_ended:
        if select.select([reading], [], [], GLANCE)[0]:
            part = os.read(reading, 1 << 16)
            last = (last + part)[-4096:]
            is_ended = not part
        else:
            is_ended = watch.is_in_vain()
    os.close(reading)
    with suppress(ProcessLookupError):  # its children, and itself where it waits
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count, _, at = (last.decode().splitlines()[-1] if last else f"1 {COLLECTION}").partition(" ")
    if at == _PASSED:
        return "survived", "", int(count)
    hung = status in (-signal.SIGPROF, -signal.SIGKILL)
    return "hung" if hung else "killed", at, int(count)


def _run_in_child(groups: Sequence[Mapping[str, float]], writing: int) -> int:
    """Runs groups of tests, each in the order given, up to the first that fails, and returns pytest's exit
    status. Each is collected when its turn comes; what all of them import is imported once.
    """

    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.argv = ["pytest"]
    status = 0
    for number, tests in enumerate(groups, 1):
        os.write(writing, f"{number} {COLLECTION}\n".encode())
        signal.setitimer(signal.ITIMER_PROF, _IMPORT_SECONDS)
        try:
            status = _run_group(tests, _Choice(tests, number, writing))
        except BaseException:
            status = 1
        if status:
            return status
    os.write(writing, f"{len(groups)} {_PASSED}\n".encode())
    return 0


def _run_group(tests: Mapping[str, float], choice: _Choice) -> int:
    """Runs tests, and returns pytest's exit status: 0 where none is there any more."""
    import pytest

    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", _IGNORED)
    status = pytest.main([*options, *files], plugins=[choice])
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


class _Choice:
    """A plugin that keeps some tests, in an order, and says as each begins."""

    def __init__(self, tests: Mapping[str, float], number: int, writing: int) -> None:
        self.tests, self.number, self.writing = tests, number, writing

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        places = {test: place for place, test in enumerate(self.tests)}
        items[:] = sorted(
            (item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, _TEST_SECONDS + _TIMES * self.tests[nodeid])
        os.write(self.writing, f"{self.number} {nodeid}\n".encode())


if __name__ == "__main__":
    main()
