"""What `attnc verify` and `attnc fuzz` judge: attentions and projections alike."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnc.cli.console import Mistake, counted, loading, paint, progress, say, say_lines

if TYPE_CHECKING:
    from attnc.plan import ir
    from attnc.plan.ir.projection import ProjectionModule
    from attnc.verify.case import Case, Fit
    from attnc.verify.check import Rules
    from attnc.verify.cover import Summary
    from attnc.verify.search import Report
    from attnc.verify.verdict import Verdict

#: Where failing cases are kept.
FAILURES = Path(".attnc") / "failures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A module's report. device: cuda or cpu; place: the same for a reader."""

    judge: Judge
    device: str
    place: str
    report: Report

    def show(self, *, covered: bool = False) -> None:
        """A line about the module, what its cases have met if that is wanted, two about each failure."""
        report = self.report
        state = paint("ok   ", "32") if report.ok else paint("WRONG", "1;31")
        where = f" at {report.where}" if report.where else ""
        say(
            state,
            f" {self.judge.title}: {counted(report.examples, 'case')} in {report.seconds:.1f} s"
            f" on {self.place}; worst error {100 * report.worst:.0f} % of the bound{where}",
        )
        if covered and report.coverage is not None:
            for line in coverage_lines(report.coverage):
                say(line)
        for failure in report.failures:
            say(f"      {failure.verdict.message}")
            say(f"      {failure.repro}")

    @property
    def data(self) -> dict[str, Any]:
        """The report for programs."""
        report = self.report
        return {
            "attention": self.judge.attention,
            "variant": self.judge.variant,
            "device": self.device,
            "ok": report.ok,
            "cases": report.examples,
            "seconds": round(report.seconds, 3),
            "worst": report.worst,
            "where": report.where,
            "eager_ratio": report.eager_ratio,
            "open": report.open,
            **({} if report.coverage is None else {"coverage": coverage_data(report.coverage)}),
            "failures": [{"message": f.verdict.message, "repro": f.repro} for f in report.failures],
        }


def coverage_data(summary: Summary) -> dict[str, Any]:
    """What a run has met, for programs."""
    return {
        "points": list(summary.points),
        "pairs": list(summary.pairs),
        "boundaries": [
            {
                "name": met.boundary.name,
                "quantity": met.boundary.quantity,
                "points": list(met.boundary.points),
                "met": list(met.met),
                "reach": met.boundary.reach,
            }
            for met in summary.boundaries
        ],
        "missed": list(summary.missed),
    }


def coverage_lines(summary: Summary) -> Iterator[str]:
    """What a run has met, for a reader: a line for each boundary, then what no case had."""
    width = max((len(met.boundary.name) for met in summary.boundaries), default=0)
    for met in summary.boundaries:
        listed = " ".join(f"{n}" if n in met.met else f"({n})" for n in met.boundary.points)
        reach = "" if met.boundary.reach != "large" else ", with --large"
        yield f"      {met.boundary.name:{width}}  {met.boundary.quantity:9} {listed}{reach}"
    points, pairs = ("{} of {}".format(*counts) for counts in (summary.points, summary.pairs))
    yield f"      {points} points (those in brackets were not met), {pairs} pairs"
    if summary.missed:
        yield f"      no case had: {', '.join(summary.missed)}"


class Judge(ABC):
    """A planned module. attention: its name in the spec, be it a projection's; path: of its file below
    generated/.
    """

    attention: str
    variant: str
    target: str
    path: str

    @property
    def title(self) -> str:
        return f"{self.attention} {self.variant}"

    @abstractmethod
    def verify(self, text: str | None, count: int, seconds: float, least: int = 0) -> Judged:
        """Runs the covering cases on the module, or on this text of it; least: whatever `seconds` says."""

    def verify_large(self, text: str | None, seconds: float) -> Judged:
        """Runs the large cases instead. Raises Mistake without a GPU, and where there are none."""
        raise Mistake(f"'{self.attention}' has no large cases", "leave --large out")

    @abstractmethod
    def fuzz(self, examples: int, seconds: float, seed: int, *, across: bool) -> Judged:
        """Draws cases until one fails; across: holds some of them to the module's other targets."""

    @abstractmethod
    def verdict(self, case: Case, *, large: bool = False) -> Verdict:
        """Runs one case, all rules included; large: as `verify_large` does. Raises Mistake for one that is
        not of this module.
        """

    def _check(self, fit: Fit, case: Case) -> None:
        if (misfit := fit.misfit(case)) is not None:
            hint = "it may be of a spec that has changed since; --attention and --variant name a module"
            raise Mistake(f"not a case of {self.title}: {misfit}", hint)


class AttentionJudge(Judge):
    """peers: the modules of the same variant for other targets."""

    def __init__(self, module: ir.Module, peers: Iterable[ir.Module]) -> None:
        from attnc.build import folder_of

        self.module, self.peers = module, tuple(peers)
        self.attention, self.variant = module.variant.attention.name, module.variant.name
        self.target, self.path = module.target, f"{folder_of(module)}/{module.variant.name}.py"

    def verify(self, text: str | None, count: int, seconds: float, least: int = 0) -> Judged:
        with loading():
            from attnc.verify.corpus import corpus
            from attnc.verify.properties import violations
            from attnc.verify.search import verify
            from attnc.verify.strategies import fit_of
            from attnc.verify.subjects import place, subject_of

            subject, title = subject_of(self.module, text), self.title
        fit = fit_of(self.module.variant.attention, len(subject.configs))
        try:
            replay = corpus(self.module.variant, fit, FAILURES)
        except ValueError as failure:
            raise Mistake(str(failure), "mend it, or remove it") from None
        with progress(title, count) as bar:
            report = verify(
                subject,
                count=count,
                seconds=seconds,
                least=least,
                progress=lambda *_: bar.advance(title),
                rules=violations,
                replay=replay,
            )
        return Judged(judge=self, device=subject.device, place=place(subject), report=report)

    def fuzz(self, examples: int, seconds: float, seed: int, *, across: bool) -> Judged:
        with loading():
            from attnc.verify.properties import violations
            from attnc.verify.search import fuzz
            from attnc.verify.subjects import place, subject_of

            subject, title = subject_of(self.module), self.title
        rules = self._agreement() if across else violations
        with progress(title, examples) as bar:
            report = fuzz(
                subject,
                examples=examples,
                seconds=seconds,
                seed=seed,
                failures=FAILURES,
                progress=lambda *_: bar.advance(title),
                rules=rules,
            )
        return Judged(judge=self, device=subject.device, place=place(subject), report=report)

    def verify_large(self, text: str | None, seconds: float) -> Judged:
        with loading():
            from attnc.verify.large import large_cases, verify_large
            from attnc.verify.subjects import has_gpu, place, subject_of

            if not has_gpu():
                raise Mistake("large sizes need a GPU", "leave --large out to use the interpreter")
            subject, title = subject_of(self.module, text), f"{self.title}, large"
        with progress(title, sum(1 for _ in large_cases(subject.space))) as bar:
            report = verify_large(subject, seconds=seconds, progress=lambda *_: bar.advance(title))
        return Judged(judge=self, device=subject.device, place=place(subject), report=report)

    def _agreement(self) -> Rules:
        """The rule that the modules for other targets compute the same. Mistake when there is none."""
        from attnc.verify.agreement import across
        from attnc.verify.subjects import subject_of

        if not self.peers:
            raise Mistake(f"'{self.attention}' has schedules for {self.target} alone", "add one more")
        return across({peer.target: subject_of(peer) for peer in self.peers})

    def verdict(self, case: Case, *, large: bool = False) -> Verdict:
        with loading():
            from attnc.verify.check import check, keeps
            from attnc.verify.large import check_large
            from attnc.verify.properties import violations
            from attnc.verify.strategies import fit_of
            from attnc.verify.subjects import subject_of

            subject = subject_of(self.module)
        self._check(fit_of(self.module.variant.attention, len(subject.configs)), case)
        if large:
            return check_large(subject, case)
        verdict = check(subject, case)
        return keeps(subject, case, violations, verdict) if verdict.ok else verdict


class ProjectionJudge(Judge):
    """Projections have one target, and no rules besides the bound."""

    def __init__(self, module: ProjectionModule) -> None:
        from attnc.build import projection_folder

        self.module = module
        self.attention, self.variant, self.target = module.name, module.variant.name, module.target
        self.path = f"{projection_folder(module)}/{module.variant.name}.py"

    def verify(self, text: str | None, count: int, seconds: float, least: int = 0) -> Judged:
        with loading():
            from attnc.verify.projection_check import projection_subject, verify_projection

        subject, title = projection_subject(self.module, text), self.title
        with progress(title, count) as bar:
            report = verify_projection(
                subject, count=count, seconds=seconds, least=least, progress=lambda *_: bar.advance(title)
            )
        return self._judged(subject.device, report)

    def fuzz(self, examples: int, seconds: float, seed: int, *, across: bool) -> Judged:
        with loading():
            from attnc.verify.projection_check import fuzz_projection, projection_subject

        subject = projection_subject(self.module)
        with progress(self.title, None):
            report = fuzz_projection(subject, examples=examples, seconds=seconds, seed=seed)
        return self._judged(subject.device, report)

    def _judged(self, device: str, report: Report) -> Judged:
        from attnc.runtime.trial import device_name

        place = "Triton's interpreter" if device == "cpu" else device_name()
        return Judged(judge=self, device=device, place=place, report=report)

    def verdict(self, case: Case, *, large: bool = False) -> Verdict:
        with loading():
            from attnc.verify.projection_cases import fit_of
            from attnc.verify.projection_check import check_projection, projection_subject

            subject = projection_subject(self.module)
        self._check(fit_of(self.module.variant, len(subject.module.CONFIGS)), case)
        return check_projection(subject, case)


def parse_case(text: str) -> Case:
    """A case from the JSON of a failure. Raises Mistake for anything else."""
    from attnc.verify.case import Case

    try:
        return Case.from_json(text)
    except (ValueError, RecursionError) as failure:
        raise Mistake(f"not a case: {failure}", "a failure prints the whole command") from None


def conclude(results: Iterable[Judged], *, as_json: bool) -> None:
    """Prints the results for programs, if that is wanted. Exit(1) if one is wrong."""
    results = tuple(results)
    if as_json:
        say_lines(json.dumps([judged.data for judged in results], indent=2))
    if not all(judged.report.ok for judged in results):
        raise typer.Exit(1)
