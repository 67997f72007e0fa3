"""Every planted mistake of attention over ranks is caught by a small case, which passes without it."""

from collections.abc import Callable, Mapping

import pytest

from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.verdict import Verdict
from tests.distributed.planted import BUGS, Bug, Shown, planted
from tests.distributed.specs import SPECS, text
from tests.distributed.test_decode import run, spec
from tests.distributed.test_engine import verdict_of

ensure_interpreter()

_SMALL = {"B": 1, "M": 33, "N": 33, "Hkv": 2, "G": 1}
_TOKEN = {"B": 1, "M": 1, "N": 40, "Hkv": 1, "G": 1}
#: The first keys and those nearby: with two ranks the second one has a hole in its window.
_FAR = text("causal and (kv_idx < 3 or kv_idx >= q_pos - 9)")

CASES: Mapping[Shown, Callable[[], Verdict]] = {
    "rows": lambda: verdict_of(SPECS["causal"], _SMALL, 2, "need"),
    "parts": lambda: verdict_of(SPECS["causal"], _SMALL, 2, "need", groups=2),
    "holes": lambda: verdict_of(_FAR, {**_SMALL, "M": 96, "N": 96}, 2, "need"),
    "sink gradient": lambda: verdict_of(SPECS["sink"], _SMALL, 2, "need"),
    "dropout": lambda: verdict_of(SPECS["dropout"], _SMALL, 2),
    "decode": lambda: run(spec(), _TOKEN, 2, 8),
    "decode sink": lambda: run(spec(sink=True), _TOKEN, 2, 8),
}


@pytest.mark.parametrize("kind", CASES)
def test_cases_pass_without_mistakes(kind: Shown) -> None:
    verdict = CASES[kind]()
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_mistakes_are_caught(bug: Bug) -> None:
    with planted(bug):
        assert not _passes(CASES[bug.shown_by]), "not caught"


def _passes(case: Callable[[], Verdict]) -> bool:
    """Whether nothing is found to be wrong; what raises is found."""
    try:
        return case().ok
    except (AssertionError, RuntimeError, IndexError):
        return False
