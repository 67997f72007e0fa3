"""From the text of a spec to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import pytest

from attnc.build import plan_program
from attnc.model.attention import Attention
from attnc.model.resolve import resolve
from attnc.plan import ir
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from attnc.verify.case import Case, Kept, TensorLayout
from attnc.verify.check import Rules, check
from attnc.verify.covering import edges, listed_cases
from attnc.verify.problem import FILLS
from attnc.verify.properties import violations
from attnc.verify.search import AttentionTrial, Progress, Report, run, search
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import rule_of
from tests.plans import plans_of
from tests.profiles import is_night
from tests.targets import EACH, skip_without_compiler


def spec(lines: Iterable[str], schedule: str = "loops = [q, kv]", *, target: str = "triton") -> str:
    """The text of one attention of these statements, with one schedule."""
    statements = "\n  ".join(lines)
    return f"attention spec {{\n  {statements}\n}}\nschedule spec for {target} {{\n  {schedule}\n}}\n"


def modules_of(text: str) -> tuple[ir.Module, ...]:
    return plan_program(resolve(parse(Source("a.attn", text)), prelude())).modules


def subject_of_text(text: str) -> Subject:
    """The one module of a spec."""
    (module,) = modules_of(text)
    return subject_of(module)


@cache
def subject_with_changes(text: str, *changes: tuple[str, str]) -> Subject:
    """The one module of a spec for sm_90a. changes: of its kernel's text, each old and new."""
    (module,) = modules_of(text)
    source = render_files(module, path="a.attn", sha256="")["default.cu"]
    for wrong, instead in changes:
        assert wrong in source
        source = source.replace(wrong, instead)
    return subject_of(module, {"default.cu": source} if changes else None)


@cache
def committed(name: str, number: int = 0) -> Subject:
    """A module of the committed spec of this name, the first unless a number says which."""
    return subject_of(plans_of(name).modules[number])


class EdgesFirst(AttentionTrial):
    """A trial with some more cases in front of the others."""

    def __init__(self, subject: Subject, edges: tuple[Case, ...], rules: Rules | None) -> None:
        super().__init__(subject, rules, rule_of=partial(rule_of, {}))
        self._edges = edges

    def cases(self, count: int) -> Iterable[Case]:
        return chain(self._edges, super().cases(count))


def verify(
    subject: Subject,
    *,
    rules: Rules | None = None,
    edges: Iterable[Case] = (),
    kept: Sequence[Kept] = (),
    count: int = 24,
    seconds: float = float("inf"),
    least: int = 0,
    fills: Iterable[str] = tuple(FILLS),
    progress: Progress | None = None,
) -> Report:
    """Runs the cases of an attention, those of `edges` first; see `run`."""
    trial = EdgesFirst(subject, tuple(edges), rules)
    trial.kept = kept
    return run(trial, count=count, seconds=seconds, least=least, fills=fills, progress=progress)


def fuzz(made: Subject, *, rules: Rules | None = None, **options: Any) -> Report:
    """Draws cases of an attention; options: of `search.search`."""
    return search(AttentionTrial(made, rules, spares_gradients=False), **options)


def assert_within_bound(made: Subject, case: Case, fills: Iterable[str] = ("nan",)) -> None:
    verdict = check(made, case, fills=fills)
    assert verdict.ok, verdict.message


def every_fill() -> tuple[str, ...]:
    """Returns what the memory around tensors is full of: by day two fills that differ in every bit, every
    night all.
    """
    nightly = is_night()
    return tuple(FILLS) if nightly else ("nan", "large")


def right_by_day(made: Subject, count: int = 3) -> None:
    """The first cases of the array of `attnc verify`, and those at the edges; every night all that it runs.

    Of bugs that only other cases show tests/planted replays such a case.
    """
    if is_night():
        report = verify(made, rules=violations)
    else:
        report = verify(made, count=count, fills=("nan",), edges=edges(made.space))
        if report.ok and report.worst <= 0.01:  # cases with few keys, whose errors are far below the bound
            listed = tuple(islice(listed_cases(made.space), 1))
            report = verify(made, count=0 if listed else 2 * count, fills=("nan",), edges=listed)
    assert report.ok, "\n".join(f"{f.repro}\n  {f.verdict.message}" for f in report.failures)
    assert 0.01 < report.worst <= 1


def examples(by_day: int) -> int:
    """Examples of a search: as many by day, and twenty times as many every night."""
    return by_day * (20 if is_night() else 1)


def transposed(attention: Attention) -> dict[str, TensorLayout]:
    """Every tensor with another order of axes, gaps of its own and an odd offset."""
    found = {}
    for number, tensor in enumerate((*attention.inputs, *attention.outputs)):
        axes = tuple(range(len(tensor.shape)))
        if len(axes) > 1:
            order = (*reversed(axes[:-1]), axes[-1])
            gaps = tuple(0 if axis else number + 1 for axis in reversed(axes))
            found[tensor.name] = TensorLayout(order=order, gaps=gaps, offset=2 * number + 1)
    return found


def for_every_target(module: str) -> Callable[..., None]:
    """A fixture that runs each test of the module for each target, named by its TARGET."""

    @pytest.fixture(autouse=True, params=EACH)
    def every_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        skip_without_compiler(request.param)
        monkeypatch.setattr(f"{module}.TARGET", request.param)

    return every_target
