"""Verification of a kernel that has a planted bug: a search from scratch, or the one case that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, TypeAlias

from attnc.runtime.loader import load_text
from attnc.target.support import standalone, with_headers
from attnc.verify.calls import call_violations
from attnc.verify.case import Case
from attnc.verify.check import check, keeps
from attnc.verify.projection_check import (
    ProjectionSubject,
    ProjectionTrial,
    check_projection,
    projection_subject,
    text_of,
)
from attnc.verify.properties import violations
from attnc.verify.search import AttentionTrial, Trial, list_steps, search
from attnc.verify.subject import Subject, make_small, subject_of
from attnc.verify.trials import large_cases
from attnc.verify.verdict import Verdict
from tests.plans import files_of
from tests.planted.bug import Bug, plant
from tests.planted.registry import module_of, projection_of

AnySubject: TypeAlias = Subject | ProjectionSubject
By: TypeAlias = Literal["bound", "gradients", "rules", "calls"]
#: Launches, each with its warps in another order, in which a race has to show.
_ORDERS = 12
#: Cases that a search may draw, by target: threads on a CPU are slow, and most bugs show in the first ten.
EXAMPLES: Mapping[str, int] = {"triton": 300, "cuda.sm_80": 60, "cuda.sm_90a": 60, "projection": 120}


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """What became of a planted bug: the case that caught it, if one did, after how many examples, and what
    gave it away.
    """

    bug: Bug
    case: Case | None
    examples: int
    message: str


def hunt(bug: Bug, *, seed: int = 0) -> Catch:
    """Plants the bug and draws cases until it is caught; how many depends on nothing but the seed."""
    subject, examples = planted(bug), EXAMPLES[bug.target]
    report = search(_trial(subject, spares_gradients=False), examples=examples, seed=seed, shrink=False)
    case, message = None, ""
    if report.failures:
        case, message = report.failures[0].case, report.failures[0].verdict.message
    return Catch(bug=bug, case=case, examples=report.examples, message=message)


def verify(bug: Bug, *, count: int = 24) -> Catch:
    """Plants the bug and runs the cases of `attnc verify`, up to the first that catches it."""
    trial, number = _trial(planted(bug)), 0
    for number, step in enumerate(list_steps(trial, count), start=1):
        verdict = step.take(trial)
        if not verdict.ok:
            return Catch(bug=bug, case=step.case, examples=number, message=verdict.message)
    return Catch(bug=bug, case=None, examples=number, message="")


def _trial(subject: AnySubject, *, spares_gradients: bool = True) -> Trial:
    if isinstance(subject, ProjectionSubject):
        return ProjectionTrial(subject)
    return AttentionTrial(subject, violations, spares_gradients=spares_gradients)


def shows(bug: Bug, case: Case, by: By, rule: str = "") -> bool:
    """Whether the case shows the bug. What depends on which warp comes first is given some orders. rule: the
    name of the one that it breaks.
    """
    subject, has_orders = planted(bug), bug.target.startswith("cuda.") and by in ("bound", "gradients")
    return any(not _judge(bug, subject, case, by, rule).ok for _ in range(_ORDERS if has_orders else 1))


def judge_clean(bug: Bug, case: Case, by: By, rule: str = "") -> Verdict:
    """The verdict on the case without the bug."""
    return _judge(bug, _clean(bug), case, by, rule)


def _judge(bug: Bug, subject: AnySubject, case: Case, by: By, rule: str) -> Verdict:
    """By the error bound, by the rules besides or one of them, or of the module's calls. By the bound,
    gradients are left out for a bug in the forward, unless it shows in them alone: "gradients". A kernel that
    has fewer configs than when the case was kept has it by the rest of its number.
    """
    if isinstance(subject, Subject):
        case = replace(case, config=case.config % len(subject.configs))
    if by == "calls" and isinstance(subject, Subject):
        message = next(iter(call_violations(subject)), "")
        return Verdict(ok=not message, message=message)
    if by == "rules" and isinstance(subject, Subject):
        return keeps(subject, case, partial(violations, only=rule), Verdict(ok=True, message=""))
    if isinstance(subject, ProjectionSubject):
        return check_projection(subject, case)
    if by == "bound" and bug.phase == "forward" and bug.file in ("", "host"):
        subject = replace(subject, gradients=None)
    return check(subject, case)


def large_case(bug: Bug, dims: Mapping[str, int]) -> Case:
    """The first case of `attnc verify --large` of these sizes, in the order of the device at hand."""
    space = subject_of(module_of(bug.attention, bug.target)).space
    return next(case for case in large_cases(space) if dims.items() <= case.dims.items())


def planted(bug: Bug) -> AnySubject:
    """The module that the bug belongs in, with the bug. ValueError as for `files_with`."""
    try:
        files = _files_with(bug, is_alone=False)
    except ValueError:  # in the support package
        files = files_with(bug)
    if bug.target.startswith("cuda."):
        every = {**_files(bug.attention, bug.target, is_alone=False), **files}
        return subject_of(module_of(bug.attention, bug.target), every)
    (text,) = files.values()
    module = load_text(text)
    make_small(module)
    return replace(_clean(bug), module=module)


def count_configs(bug: Bug) -> int:
    """How many configs cases of the module without the bug may name."""
    clean = _clean(bug)
    return len(clean.configs if isinstance(clean, Subject) else clean.module.CONFIGS)


def _clean(bug: Bug) -> AnySubject:
    if bug.target == "projection":
        return _projection(bug.attention)
    return _attention(bug.attention, bug.target)


def files_with(bug: Bug) -> dict[str, str]:
    """The files of the module that the bug is in, by name, with the bug. ValueError unless each anchor occurs
    exactly once.
    """
    return _files_with(bug, is_alone=True)


def _files_with(bug: Bug, *, is_alone: bool) -> dict[str, str]:
    files = _files(bug.attention, bug.target, is_alone=is_alone)
    found: dict[str, str] = {}
    for place in bug.places:
        name = next(iter(files))
        if bug.target.startswith("cuda."):
            variant = module_of(bug.attention, bug.target).variant
            ending = f"_{place.file}.cu" if place.file else ".cu"
            name = f"{variant.name}.py" if place.file == "host" else f"{variant.kernels}{ending}"
        try:
            found[name] = plant(found.get(name, files[name]), place)
        except ValueError as failure:
            raise ValueError(f"'{bug.name}' of '{bug.attention}': {failure}") from None
    return found


@cache
def _files(attention: str, target: str, *, is_alone: bool) -> dict[str, str]:
    """is_alone: with the support package in the module, so that bugs of its text can be planted too. It takes
    longer to compile than the rest.
    """
    if target == "projection":
        text = text_of(projection_of(attention))
        return {"": standalone(text) if is_alone else text}
    files = files_of(module_of(attention, target))
    return {
        name: with_headers(text) if not name.endswith(".py") else standalone(text) if is_alone else text
        for name, text in files.items()
    }


@cache
def _attention(attention: str, target: str) -> Subject:
    return subject_of(module_of(attention, target))


@cache
def _projection(name: str) -> ProjectionSubject:
    return projection_subject(projection_of(name))


def table(catches: list[Catch]) -> str:
    """One line per bug: caught after how many examples, and how it showed."""
    lines = [
        f"{'MISSED' if c.case is None else 'caught':7} {c.examples:4}  "
        f"{c.bug.name:34} {c.bug.attention:15} {c.message[:60]}"
        for c in catches
    ]
    caught = sum(c.case is not None for c in catches)
    return "\n".join([*lines, f"{caught} of {len(catches)} bugs caught"])
