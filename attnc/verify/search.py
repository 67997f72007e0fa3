"""Looks for a case that a generated module gets wrong: the same cases on every run, or drawn ones."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import TypeAlias
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as seeded

from attnc.verify.case import Case
from attnc.verify.check import Rules, check, keeps
from attnc.verify.cover import Coverage, Summary
from attnc.verify.covering import covering_cases
from attnc.verify.problem import FILLS
from attnc.verify.strategies import Limits, cases
from attnc.verify.subject import Subject
from attnc.verify.verdict import Verdict

Progress: TypeAlias = Callable[[int, Case, Verdict], None]
#: Every such case, or the next small one, is held to the rules too: they run the kernel some twenty times.
_EVERY, _SMALL = 8, 1 << 21
#: What `least` may make of `seconds`.
_LONGER = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that fails, the smallest found, and the command that runs it again."""

    case: Case
    verdict: Verdict
    repro: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a module did. `worst`, `eager_ratio`, `norm_ratio`: the largest seen; `examples`: how many cases
    were run; `open`: elements of which nothing is promised; `coverage`: what the cases have met.
    """

    examples: int
    seconds: float
    worst: float = 0.0
    where: str = ""
    worst_case: Case | None = None
    norm_ratio: float = 0.0
    eager_ratio: float = 0.0
    open: int = 0
    failures: tuple[Failure, ...] = ()
    coverage: Summary | None = None

    @property
    def ok(self) -> bool:
        return not self.failures


@dataclass(slots=True)
class _Tally:
    """Collects verdicts into a report."""

    subject: Subject
    progress: Progress | None
    limits: Limits
    started: float = field(default_factory=lambda: time.monotonic())
    examples: int = 0
    held: int = 0
    worst: tuple[float, str, Case | None] = (0.0, "", None)
    norm_ratio: float = 0.0
    eager_ratio: float = 0.0
    open: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_due(self, case: Case) -> bool:
        """Whether this case is to be held to the rules: about every eighth, if it is small."""
        due = (self.examples + 1) // _EVERY > self.held and prod(case.dims.values()) <= _SMALL
        due = due and self.limits.cost(case.dims, case.config) <= self.limits.work
        self.held += due
        return due

    def count(self, case: Case, verdict: Verdict) -> None:
        self.examples += 1
        self.norm_ratio = max(self.norm_ratio, verdict.norm_ratio)
        self.eager_ratio = max(self.eager_ratio, verdict.eager_ratio)
        self.open += verdict.open
        if verdict.worst > self.worst[0]:
            self.worst = (verdict.worst, verdict.where, case)
        if self.progress is not None:
            self.progress(self.examples, case, verdict)

    def fail(self, case: Case, verdict: Verdict) -> None:
        self.failures.append(
            Failure(case=case, verdict=verdict, repro=case.repro(self.subject.variant, self.subject.target))
        )

    def report(self) -> Report:
        worst, where, case = self.worst
        return Report(
            examples=self.examples,
            seconds=self.seconds,
            worst=worst,
            where=where,
            worst_case=case,
            norm_ratio=self.norm_ratio,
            eager_ratio=self.eager_ratio,
            open=self.open,
            failures=tuple(self.failures),
        )


def verify(
    subject: Subject,
    *,
    count: int = 24,
    seconds: float = float("inf"),
    least: int = 0,
    fills: Iterable[str] = tuple(FILLS),
    progress: Progress | None = None,
    rules: Rules | None = None,
    replay: Iterable[Case] = (),
) -> Report:
    """The cases of `replay`, then the covering ones: the same on every run. Stops after `seconds`, though
    ten times later if it has not run `least` cases, or at the third failure. Of a case whose gradients cost
    more than `Subject.limits` allow, the outputs alone are judged.

    fills: what surrounds tensors, the first and one of the others in turn; rules: what every eighth case must
    keep besides the error bound.
    """
    limits = subject.limits()
    tally, coverage = _Tally(subject, progress, limits), Coverage(subject.space)
    first, *others = fills
    array = chain(replay, covering_cases(subject.space, limits, count))
    for number, case in enumerate(array):
        second = others[number % len(others) :][:1] if others else ()
        judged = replace(subject, gradients=None)
        if limits.includes_gradients(case.dims, case.config):
            judged = subject
        verdict = check(judged, case, fills=(first, *second))
        if verdict.ok and rules is not None and tally.is_due(case):
            verdict = keeps(subject, case, rules, verdict)
        tally.count(case, verdict)
        coverage.note(case)
        if not verdict.ok:
            tally.fail(case, verdict)
        if is_late(tally, seconds, least) or len(tally.failures) == 3:
            break
    return replace(tally.report(), coverage=coverage.summary)


def is_late(done: Report | _Tally, seconds: float, least: int) -> bool:
    """Whether what was done has taken its time: `seconds`, or ten times as long where fewer than `least`
    cases were run.
    """
    return done.seconds > (seconds if done.examples >= least else _LONGER * seconds)


def searching(examples: int, *, shrink: bool) -> settings:
    """How Hypothesis draws cases until one fails: as the seed says, and nothing is kept between runs."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.target, *((Phase.shrink,) if shrink else ())),
        suppress_health_check=list(HealthCheck),
    )


def fuzz(
    subject: Subject,
    *,
    examples: int = 100,
    seconds: float = float("inf"),
    seed: int = 0,
    shrink: bool = True,
    progress: Progress | None = None,
    failures: Path | None = None,
    rules: Rules | None = None,
) -> Report:
    """Draws cases, leaning towards those that come close to the bound, until one fails; then makes it
    smaller.

    Ends after `examples` or about `seconds`, whichever is first, and after one case at least. `failures`: a
    directory for the case that failed, as JSON. rules: what every eighth case must keep besides the error
    bound.
    """
    limits = subject.limits()
    tally = _Tally(subject, progress, limits)
    known: dict[str, Verdict] = {}

    @seeded(seed)
    @searching(examples, shrink=shrink)
    @given(cases(subject.variant, limits))
    def passes(case: Case) -> None:
        key = case.to_json()
        if key not in known:
            if known and tally.seconds > seconds:
                if all(verdict.ok for verdict in known.values()):
                    raise TimeIsUp("enough")
                return
            known[key] = check(subject, case)
            if known[key].ok and rules is not None and tally.is_due(case):
                known[key] = keeps(subject, case, rules, known[key])
            tally.count(case, known[key])
        verdict = known[key]
        target(min(verdict.worst, 1e3), label="error / bound")
        if not verdict.ok:
            raise _Caught(case, verdict)

    try:
        with suppress(TimeIsUp):
            passes()
    except _Caught as caught:
        tally.fail(caught.case, caught.verdict)
        if failures is not None:
            save(failures, subject, tally.failures[0])
    return tally.report()


class TimeIsUp(SkipTest):
    """Ends a search at once: Hypothesis hands it on, and would go on drawing after a mere return."""


class _Caught(Exception):
    """A failing case on its way out of Hypothesis, which raises the smallest."""

    def __init__(self, case: Case, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.case = case
        self.verdict = verdict


def save(directory: Path, subject: Subject, failure: Failure) -> Path:
    """Writes a failing case as JSON (`Case.from_json` reads it), named after its variant and content."""
    text = failure.case.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    variant = subject.variant
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{variant.attention.name}-{variant.name}-{digest}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return path
