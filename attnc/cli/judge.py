"""What `attnc verify` and `attnc fuzz` judge, attentions and projections alike, and the options that say
which modules of specs are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from attnc.cli.console import Mistake, count_noun, loading, paint, progress, say, say_json, without_kernels
from attnc.diagnostics import did_you_mean
from attnc.model.targets import TARGETS, suggest_target

if TYPE_CHECKING:
    from attnc.plan import ir
    from attnc.plan.projection import ProjectionModule
    from attnc.verify.case import Kept
    from attnc.verify.cover import Summary
    from attnc.verify.search import Report, Trial
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
        """Prints a line about the module, what its cases have met if that is wanted, two about each
        failure.
        """
        report = self.report
        state = paint("ok   ", "32") if report.ok else paint("WRONG", "1;31")
        where = f" at {report.where}" if report.where else ""
        again = f" and {count_noun(report.replayed, 'kept one')}" if report.replayed else ""
        again += f" and {report.simulated} simulated" if report.simulated else ""
        say(
            state,
            f" {self.judge.title}: {count_noun(report.examples, 'case')}{again} in {report.seconds:.1f} s"
            f" on {self.place}; worst error {100 * report.worst:.0f} % of the bound{where}",
        )
        if report.left_out:
            say(f"      {count_noun(report.left_out, 'case')} left out; the first {report.lack}")
        if covered and report.coverage is not None:
            for line in (*coverage_lines(report.coverage), *self.simulation_lines()):
                say(line)
        for failure in report.failures:
            say(f"      {failure.verdict.message}")
            say(f"      {failure.repro}")

    def simulation_lines(self) -> Iterator[str]:
        """Yields how many cases were simulated beside those on a GPU, of a module that is both."""
        from attnc.verify.runners import runner_of

        runner, count = runner_of(self.judge.target), self.report.simulated
        if self.device == "cpu" or not runner.runs_beside_gpu:
            return
        if count:
            yield f"      {count_noun(count, 'case')} simulated: copies come late, warps run in any order"
        elif runner.is_available():
            yield "      no case simulated: something was wrong before, or time was over"
        else:
            yield "      no case simulated: there is no g++"

    @property
    def data(self) -> dict[str, Any]:
        report = self.report
        return {
            "attention": self.judge.attention,
            "variant": self.judge.variant,
            "device": self.device,
            "ok": report.ok,
            "cases": report.examples,
            "replayed": report.replayed,
            "left_out": report.left_out,
            "lack": report.lack,
            "simulated": report.simulated,
            "seconds": round(report.seconds, 3),
            "worst": report.worst,
            "where": report.where,
            "eager_ratio": report.eager_ratio,
            "open": report.open,
            **({} if report.coverage is None else {"coverage": coverage_data(report.coverage)}),
            "failures": [{"message": f.verdict.message, "repro": f.repro} for f in report.failures],
        }


def coverage_data(summary: Summary) -> dict[str, Any]:
    """Returns the coverage of a run, for programs."""
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
    """Yields the coverage of a run, for a reader: a line for each boundary, then those that no case had."""
    width = max((len(met.boundary.name) for met in summary.boundaries), default=0)
    for met in summary.boundaries:
        listed = " ".join(f"{n}" if n in met.met else f"({n})" for n in met.boundary.points)
        reach = "" if met.boundary.reach != "large" else ", with --large"
        yield f"      {met.boundary.name:{width}}  {met.boundary.quantity:9} {listed}{reach}"
    points, pairs = ("{} of {}".format(*counts) for counts in (summary.points, summary.pairs))
    yield f"      {points} points (those in brackets were not met), {pairs} pairs"
    if summary.missed:
        yield f"      no case had: {', '.join(summary.missed)}"


class Judge:
    """Runs the cases of a planned module. attention: its name in the spec, be it a projection's; path: of its
    file below generated/; peers: the modules of the same variant for other targets.
    """

    def __init__(self, module: ir.Module | ProjectionModule, peers: Iterable[ir.Module] = ()) -> None:
        from attnc.build import folder_of

        self.module, self.peers = module, tuple(peers)
        folder, _, _ = folder_of(module).partition("/")
        self.attention, self.variant, self.target = folder, module.variant.name, module.target
        self.path = f"{folder_of(module)}/{self.variant}.py"

    @property
    def title(self) -> str:
        from attnc.plan.targets import TARGETS

        usual = next(iter(TARGETS))
        return f"{self.attention} {self.variant}{'' if self.target == usual else f' for {self.target}'}"

    @property
    def is_projection(self) -> bool:
        from attnc.plan.projection import ProjectionModule

        return isinstance(self.module, ProjectionModule)

    def verify(self, text: str | None, count: int, seconds: float, least: int = 0) -> Judged:
        """Runs the cases of the module, or of this text of it, that are the same on every run; least:
        whatever `seconds` says.
        """
        try:
            trial = self._trial(text, failures=FAILURES, peers=self.peers)
        except ValueError as failure:
            raise Mistake(str(failure), "mend it, or remove it") from None
        return self._run(trial, self.title, count, count=count, seconds=seconds, least=least)

    def verify_large(self, text: str | None, seconds: float) -> Judged:
        """Runs the large cases instead. Raises Mistake without a GPU, and where there are none."""
        if self.is_projection:
            raise Mistake(f"'{self.attention}' has no large cases", "leave --large out")
        with loading():
            from attnc.verify.subject import has_gpu

            if not has_gpu():
                raise Mistake("large sizes need a GPU", "leave --large out to use the interpreter")
        trial = self._trial(text, large=True)
        return self._run(trial, f"{self.title}, large", sum(1 for _ in trial.cases(0)), seconds=seconds)

    def fuzz(self, examples: int, seconds: float, seed: int, *, across: bool) -> Judged:
        """Draws cases until one fails; across: holds some of them to the module's other targets."""
        if across and not self.peers:
            raise Mistake(f"'{self.attention}' has schedules for {self.target} alone", "add one more")
        trial = self._trial(peers=self.peers, are_compared=across)
        from attnc.verify.search import search

        with progress(self.title, examples) as bar:
            report = search(
                trial,
                examples=examples,
                seconds=seconds,
                seed=seed,
                failures=FAILURES,
                progress=lambda *_: bar.advance(self.title),
            )
        return self._report_of(trial, report)

    def verdict(self, kept: Kept, *, large: bool = False) -> Verdict:
        """Runs one case, with all properties and the rule that it broke; large: as `verify_large` does.
        Raises Mistake for one that is not of this module.
        """
        from attnc.verify.search import settle

        trial, case = self._trial(large=large, peers=self.peers), kept.case

        def judge() -> Verdict:
            found = trial.verdict(case)
            return trial.replay(kept, ("nan",)) if found.ok and kept.rule else found

        if (misfit := trial.fit.misfit(case)) is not None:
            hint = "it may be of a spec that has changed since; --attention and --variant name a module"
            raise Mistake(f"not a case of {self.title}: {misfit}", hint)
        try:
            return settle(trial, case, judge)
        except (MemoryError, RuntimeError) as failure:
            from attnc.runtime.memory import describe_lack, ran_out_of_memory

            if ran_out_of_memory(failure):
                raise Mistake("the case takes more memory than there is", describe_lack(failure)) from None
            raise

    def _trial(self, text: str | None = None, **wanted: Any) -> Trial:
        with loading():
            from attnc.verify.trials import trial_of

            return trial_of(self.module, text, **wanted)

    def _run(self, trial: Trial, title: str, total: int, **limits: Any) -> Judged:
        from attnc.verify.search import run

        with progress(title, total) as bar:
            return self._report_of(trial, run(trial, progress=lambda *_: bar.advance(title), **limits))

    def _report_of(self, trial: Trial, report: Report) -> Judged:
        return Judged(judge=self, device=trial.device, place=trial.place, report=report)


def parse_kept(text: str, hint: str = "a failure prints the whole command") -> Kept:
    """Returns a case, and what it broke, from the JSON of a failure. Raises Mistake for anything else."""
    from attnc.verify.case import Kept

    try:
        return Kept.from_json(text)
    except (ValueError, RecursionError) as failure:
        raise Mistake(f"not a case: {failure}", hint) from None


def conclude(results: Iterable[Judged], *, as_json: bool) -> None:
    """Prints the results for programs, if that is wanted. Exit(1) if one is wrong."""
    results = tuple(results)
    if as_json:
        say_json([judged.data for judged in results])
    if not all(judged.report.ok for judged in results):
        raise typer.Exit(1)


# --- the modules that options leave -------------------------------------------------------------------------


Item = TypeVar("Item")
ATTENTION = Annotated[str | None, typer.Option(help="Only this attention of the specs.")]
VARIANT = Annotated[str | None, typer.Option(help="Only this variant, e.g. bf16_d128.")]
TARGET = Annotated[
    str | None,
    typer.Option(help="Only this target; if left out triton, or the first where there is none for it."),
]


def choose_judges(
    paths: Sequence[Path],
    attention: str | None,
    variant: str | None,
    target: str | None,
    *,
    every_target: bool = False,
) -> tuple[Judge, ...]:
    """Returns the modules that the options select, projections last. Without a target, each attention is
    judged on Triton, or on its first target if it has no schedule for Triton; with `every_target`, on all.
    An attention without a schedule gets those of `attnc.compile`. Raises DiagnosticError, and Mistake if
    nothing is selected.
    """
    with loading():
        from attnc.build import front, plan_program, schedule_all
        from attnc.effort import limit_steps

    wanted, only_first = wanted_targets(target), target is None and not every_target
    programs, planned = [], []
    with progress("plan", len(paths)) as bar:
        for path in paths:
            bar.advance(path.name)
            with limit_steps():
                programs.append(schedule_all(front(path), wanted, attention, only_first=only_first)[0])
                planned.append(plan_program(programs[-1]))
    found: list[Judge] = [
        *(Judge(module, _peers(module, plan.modules)) for plan in planned for module in plan.modules),
        *(Judge(module) for plan in planned for module in plan.projections),
    ]
    if not found:
        raise without_kernels("these specs", sum(len(program.schedules) for program in programs))
    if target is not None:
        found = only(found, "target", target, lambda judge: judge.target)
    elif not every_target:
        found = _select_usual_targets(found)
    found = only(found, "attention", attention, lambda judge: judge.attention)
    return tuple(only(found, "variant", variant, lambda judge: judge.variant))


def _select_usual_targets(found: Sequence[Judge]) -> list[Judge]:
    """Selects of each attention the modules for Triton, or for its first target in the order of `TARGETS`."""
    from attnc.plan.targets import TARGETS

    order = list(TARGETS)
    usual: dict[str, str] = {}
    for judge in found:
        usual[judge.attention] = min(usual.get(judge.attention, judge.target), judge.target, key=order.index)
    return [judge for judge in found if judge.target == usual[judge.attention]]


def _peers(module: ir.Module, others: Sequence[ir.Module]) -> list[ir.Module]:
    name = (module.variant.attention.name, module.variant.name)
    return [
        other
        for other in others
        if other.target != module.target and (other.variant.attention.name, other.variant.name) == name
    ]


def wanted_targets(target: str | None) -> list[str]:
    """Returns the targets for which an attention without a schedule can get one: that which is wanted, else
    all. Raises Mistake where there is no such target.
    """
    from attnc.plan.targets import TARGETS as WITH_KERNELS
    from attnc.plan.targets import USUAL

    if target is None:
        return list(USUAL)
    if target not in WITH_KERNELS:
        hint = "".join(suggest_target(target, WITH_KERNELS)) or f"targets are {', '.join(USUAL)}"
        raise Mistake(f"there is no target '{target}'", hint)
    return [target]


def only(found: Sequence[Item], what: str, wanted: str | None, name_of: Callable[[Item], str]) -> list[Item]:
    """Selects what has this name, or all where none is wanted. Raises Mistake when there is none."""
    kept = [item for item in found if wanted is None or name_of(item) == wanted]
    if not kept:
        known = list(dict.fromkeys(map(name_of, found)))
        if what == "target" and wanted in TARGETS:
            hint = f"add one: schedule NAME for {wanted} {{ }}; there are those for {', '.join(known)}"
            raise Mistake(f"there is no target '{wanted}' among the schedules", hint)
        close = suggest_target if what == "target" else did_you_mean
        hint = "".join(close(wanted or "", known)) or f"{what}s are {', '.join(known)}"
        raise Mistake(f"there is no {what} '{wanted}'", hint)
    return kept
