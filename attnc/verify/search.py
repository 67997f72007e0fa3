"""Looks for a case that a generated module gets wrong: the same cases on every run, or drawn ones. One
search for attentions and projections: what differs is a `Trial`.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from attnc.files import write_text
from attnc.plan.targets import TARGETS
from attnc.runtime.last_words import noting
from attnc.runtime.memory import GpuLost, describe_loss, is_lost
from attnc.verify.case import Case, Fit, Kept
from attnc.verify.check import Rules, check, keeps
from attnc.verify.cover import Coverage, Summary
from attnc.verify.covering import covering_cases
from attnc.verify.problem import FILLS
from attnc.verify.strategies import cases, fit_of
from attnc.verify.subject import Subject, place
from attnc.verify.verdict import Verdict

Progress: TypeAlias = Callable[[int, Case, Verdict], None]
#: The case behind so many, or the next small one, is held to the rules too: they run the kernel twenty times.
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
    """How a module did. `worst`, `eager_ratio`: the largest seen; `examples`: how many cases were run;
    `open`: elements of which nothing is promised; `coverage`: what the cases have met; `replayed`: how many
    kept failures were run in addition; only `failures` has details of them; left_out: cases besides that took
    more memory than there is; lack: what the first of these asked for; simulated: those that ran on the CPU
    beside a GPU's.
    """

    examples: int
    seconds: float
    worst: float = 0.0
    where: str = ""
    eager_ratio: float = 0.0
    open: int = 0
    failures: tuple[Failure, ...] = ()
    coverage: Summary | None = None
    replayed: int = 0
    left_out: int = 0
    lack: str = ""
    simulated: int = 0

    @property
    def ok(self) -> bool:
        return not self.failures


class Trial(ABC):
    """A module under test, and its cases.

    name: of the file that keeps failing cases; target: of the module; fit: the limits of a case; device: cuda
    or cpu; place: the device as messages name it; kept: failures to run again; simulated: for a module on a
    GPU, cases that run on the CPU as well.
    """

    name: str
    target: str
    fit: Fit
    device: str
    place: str
    kept: Sequence[Kept] = ()
    simulated: Trial | None = None

    @abstractmethod
    def cases(self, count: int) -> Iterable[Case]:
        """Yields cases that are the same on every run: those at boundaries, and about `count` others."""

    @abstractmethod
    def draw_cases(self) -> SearchStrategy[Case]:
        """Returns all cases that there are, to be drawn from."""

    @abstractmethod
    def check(self, case: Case, fills: Iterable[str]) -> Verdict:
        """Runs one, with each of the fills around its tensors."""

    @abstractmethod
    def repro(self, case: Case, rule: str = "") -> str:
        """Returns the command that runs it again. rule: what it broke, of which the command has to know."""

    @abstractmethod
    def note(self, case: Case) -> None:
        """Notes what a case has met."""

    @property
    @abstractmethod
    def coverage(self) -> Summary:
        """What all of them have met."""

    def verdict(self, case: Case) -> Verdict:
        return self.check(case, ("nan",))

    def replay(self, kept: Kept, fills: Iterable[str]) -> Verdict:
        return self.check(kept.case, fills)

    def has_rules_for(self, case: Case) -> bool:
        return False

    def kernels(self, *, backward: bool) -> str:
        """Names the kernels of the forward, or those of the backward, for a reader."""
        return "its kernel"

    def hold_to_rules(self, case: Case, verdict: Verdict) -> Verdict:
        return verdict


def settle(trial: Trial, case: Case, judge: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict of `judge` on a case. Raises GpuLost, which names the case, if the GPU takes no
    more work from then on: verdicts on other cases would mean nothing.
    """
    try:
        with noting(f"{trial.name} on {trial.place}", partial(trial.repro, case)):
            verdict = judge()
    except Exception as error:
        if not is_lost(trial.device):
            raise
        raise _lost(trial, case, str(error)) from error
    if not verdict.ok and is_lost(trial.device):
        raise _lost(trial, case, verdict.message)
    return verdict


def _lost(trial: Trial, case: Case, said: str) -> GpuLost:
    where = f"{trial.name} on {trial.place}, by {trial.kernels(backward=said.startswith('backward'))}"
    return GpuLost(f"{where}: {describe_loss(said)}", trial.repro(case), case)


class AttentionTrial(Trial):
    """rules: what one case in eight must keep besides the error bound; rule_of: one of them by its name, all
    for a name that none has. spares_gradients: of a case whose gradients cost more than `Subject.limits`
    allow, the outputs alone are judged.
    """

    def __init__(
        self,
        subject: Subject,
        rules: Rules | None = None,
        *,
        rule_of: Callable[[str], Rules | None] | None = None,
        spares_gradients: bool = True,
    ) -> None:
        self.subject, self.rules, self.rule_of = subject, rules, rule_of
        self._spares = spares_gradients
        self.name = f"{subject.variant.attention.name}-{subject.variant.name}"
        self.target = subject.target
        self.fit = fit_of(subject.variant.attention, len(subject.configs))
        self.device, self.place = subject.device, place(subject)
        self._limits, self._coverage = subject.limits(), Coverage(subject.space)

    def cases(self, count: int) -> Iterable[Case]:
        return covering_cases(self.subject.space, self._limits, count)

    def draw_cases(self) -> SearchStrategy[Case]:
        return cases(self.subject.variant, self._limits)

    def check(self, case: Case, fills: Iterable[str]) -> Verdict:
        subject = self.subject
        if self._spares and not self._limits.includes_gradients(case.dims, case.config):
            subject = replace(subject, gradients=None)
        return check(subject, case, fills=fills)

    def verdict(self, case: Case) -> Verdict:
        verdict = check(self.subject, case)
        if not verdict.ok or self.rules is None:
            return verdict
        return keeps(self.subject, case, self.rules, verdict)

    def replay(self, kept: Kept, fills: Iterable[str]) -> Verdict:
        verdict = self.check(kept.case, fills)
        rules = self.rule_of(kept.rule) if kept.rule and self.rule_of is not None else None
        return keeps(self.subject, kept.case, rules, verdict) if verdict.ok and rules is not None else verdict

    def repro(self, case: Case, rule: str = "") -> str:
        return case.repro(self.subject.variant, self.subject.target, rule)

    def note(self, case: Case) -> None:
        self._coverage.note(case)

    @property
    def coverage(self) -> Summary:
        return self._coverage.summary

    def kernels(self, *, backward: bool) -> str:
        plan = self.subject.plan
        if plan is None:
            return "a kernel of the backward" if backward else "a kernel of the forward"
        found = plan.backward_kernels.values() if backward else [plan.kernel]
        return " or ".join(kernel.name for kernel in found)

    def has_rules_for(self, case: Case) -> bool:
        """Returns whether the case is small: rules run the kernel some twenty times."""
        if self.rules is None or prod(case.dims.values()) > _SMALL:
            return False
        return self._limits.cost(case.dims, case.config) <= self._limits.work

    def hold_to_rules(self, case: Case, verdict: Verdict) -> Verdict:
        return verdict if self.rules is None else keeps(self.subject, case, self.rules, verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A case in its turn: what surrounds its tensors, and whether it is held to the rules too."""

    case: Case
    fills: tuple[str, ...]
    is_held: bool

    def take(self, trial: Trial) -> Verdict:
        verdict = trial.check(self.case, self.fills)
        return trial.hold_to_rules(self.case, verdict) if self.is_held and verdict.ok else verdict


class _StepMaker:
    """Makes steps of cases: about one in eight is held to the rules, if it is small."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._seen = self._held = 0

    def next_step(self, case: Case, fills: Iterable[str]) -> Step:
        is_held = self._seen // _EVERY > self._held and self._trial.has_rules_for(case)
        self._seen += 1
        self._held += is_held
        return Step(case=case, fills=tuple(fills), is_held=is_held)


def list_steps(trial: Trial, count: int, fills: Iterable[str] = tuple(FILLS)) -> Iterator[Step]:
    """Yields the cases of a trial that are the same on every run, in their order. fills: what surrounds
    tensors, the first and one of the others in turn.
    """
    first, *others = fills
    maker = _StepMaker(trial)
    for number, case in enumerate(trial.cases(count)):
        second = others[number % len(others) :][:1] if others else ()
        yield maker.next_step(case, (first, *second))


@dataclass(slots=True)
class _Tally:
    trial: Trial
    progress: Progress | None
    started: float = field(default_factory=lambda: time.monotonic())
    examples: int = 0
    worst: tuple[float, str] = (0.0, "")
    eager_ratio: float = 0.0
    open: int = 0
    left_out: int = 0
    lack: str = ""
    failures: list[Failure] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def judge(self, step: Step) -> Verdict:
        verdict = settle(self.trial, step.case, lambda: step.take(self.trial))
        self.examples += not verdict.is_left_out
        self.left_out += verdict.is_left_out
        if verdict.is_left_out:
            self.lack = self.lack or verdict.message
        self.eager_ratio = max(self.eager_ratio, verdict.eager_ratio)
        self.open += verdict.open
        if verdict.worst > self.worst[0]:
            self.worst = (verdict.worst, verdict.where)
        if self.progress is not None:
            self.progress(self.examples + self.left_out, step.case, verdict)
        return verdict

    def fail(self, case: Case, verdict: Verdict) -> None:
        rule = verdict.rule if verdict.rule in TARGETS else ""  # others are asked of every case again
        self.failures.append(Failure(case=case, verdict=verdict, repro=self.trial.repro(case, rule)))

    def report(self) -> Report:
        worst, where = self.worst
        return Report(
            examples=self.examples,
            seconds=self.seconds,
            worst=worst,
            where=where,
            eager_ratio=self.eager_ratio,
            open=self.open,
            failures=tuple(self.failures),
            left_out=self.left_out,
            lack=self.lack,
        )


def run(
    trial: Trial,
    *,
    count: int = 24,
    seconds: float = float("inf"),
    least: int = 0,
    fills: Iterable[str] = tuple(FILLS),
    progress: Progress | None = None,
) -> Report:
    """Runs the cases of a trial that are the same on every run. Stops after `seconds`, though ten times later
    if it has not run `least` cases, or at the third failure. Kept failures are run before, and change nothing
    of that.

    fills: what surrounds tensors, the first and one of the others in turn.
    """
    fills = tuple(fills)
    replayed = _Tally(trial, None)
    for kept in trial.kept:
        verdict = settle(trial, kept.case, partial(trial.replay, kept, fills[:2]))
        if not verdict.ok:
            replayed.fail(kept.case, verdict)
    tally = _Tally(trial, progress)
    for step in list_steps(trial, count, fills):
        verdict = tally.judge(step)
        if not verdict.is_left_out:
            trial.note(step.case)
        if not verdict.ok:
            tally.fail(step.case, verdict)
        is_late = tally.seconds > (seconds if tally.examples >= least else _LONGER * seconds)
        if is_late or len(tally.failures) == 3:
            break
    failures, simulated = [*replayed.failures, *tally.failures], 0
    if trial.simulated is not None and not tally.failures and tally.seconds <= seconds:
        beside = run(trial.simulated)
        failures, simulated = [*failures, *beside.failures], beside.examples
    return replace(
        tally.report(),
        coverage=trial.coverage,
        failures=tuple(failures),
        replayed=len(trial.kept),
        simulated=simulated,
    )


def search(
    trial: Trial,
    *,
    examples: int = 100,
    seconds: float = float("inf"),
    seed: int = 0,
    shrink: bool = True,
    progress: Progress | None = None,
    failures: Path | None = None,
) -> Report:
    """Draws cases, leaning towards those that come close to the bound, until one fails; then makes it
    smaller.

    Ends after `examples` or about `seconds`, whichever is first, and after one case at least. `failures`: a
    directory for the case that failed, as JSON.
    """
    tally, maker = _Tally(trial, progress), _StepMaker(trial)
    known: dict[str, Verdict] = {}
    lost: GpuLost | None = None

    @seeded(seed)
    @settings(  # nothing is kept between runs
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.target, *((Phase.shrink,) if shrink else ())),
        suppress_health_check=list(HealthCheck),
    )
    @given(trial.draw_cases())
    def passes(case: Case) -> None:
        key = case.to_json()
        if key not in known:
            if known and tally.seconds > seconds:
                if all(verdict.ok for verdict in known.values()):
                    raise _TimeIsUp("enough")
                return
            try:
                known[key] = tally.judge(maker.next_step(case, ("nan",)))
            except GpuLost as error:
                nonlocal lost
                lost = error  # and is not made smaller
                raise _TimeIsUp("no more runs") from error
        verdict = known[key]
        target(min(verdict.worst, 1e3), label="error / bound")
        if not verdict.ok:
            raise _Caught(case, verdict)

    try:
        with suppress(_TimeIsUp):
            passes()
    except _Caught as caught:
        tally.fail(caught.case, caught.verdict)
        if failures is not None:
            save(failures, trial, tally.failures[0])
    if lost is not None:
        if failures is not None:
            verdict = Verdict(ok=False, message=lost.what)
            save(failures, trial, Failure(case=lost.case, verdict=verdict, repro=lost.repro))
        raise lost
    return tally.report()


class _TimeIsUp(SkipTest):
    """Ends a search at once: Hypothesis hands it on, and would go on drawing after a mere return."""


class _Caught(Exception):
    """A failing case on its way out of Hypothesis, which raises the smallest."""

    def __init__(self, case: Case, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.case = case
        self.verdict = verdict


def save(directory: Path, trial: Trial, failure: Failure) -> Path:
    """Writes a failing case as JSON (`Kept.from_json` reads it), named after its variant and content."""
    text = Kept(case=failure.case, rule=failure.verdict.rule, target=trial.target).to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = directory / f"{trial.name}-{digest}.json"
    write_text(path, text + "\n")
    return path
