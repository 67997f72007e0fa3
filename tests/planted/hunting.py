"""Verification of a kernel that has a planted bug: a search from scratch, or the one case that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from attnc.build import digest
from attnc.runtime.loader import load_text
from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.projection_check import (
    ProjectionSubject,
    check_projection,
    fuzz_projection,
    projection_subject,
    text_of,
)
from attnc.verify.search import fuzz
from attnc.verify.subject import Subject
from attnc.verify.subjects import cuda_subject, subject_of
from attnc.verify.verdict import Verdict
from tests.planted.bug import Bug, CudaBug, plant
from tests.planted.registry import module_of, projection_of

AnySubject: TypeAlias = Subject | ProjectionSubject
#: Cases that a search may draw, by target: threads on a CPU are slow, and most bugs show in the first ten.
EXAMPLES: Mapping[str, int] = {"triton": 300, "cuda.sm_80": 60, "projection": 120}
_ENDINGS = {"": ".cu", "host": ".py"}


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
    if isinstance(subject, ProjectionSubject):
        report = fuzz_projection(subject, examples=examples, seconds=float("inf"), seed=seed, shrink=False)
    else:
        report = fuzz(subject, examples=examples, seconds=float("inf"), seed=seed, shrink=False)
    case, message = None, ""
    if report.failures:
        case, message = report.failures[0].case, report.failures[0].verdict.message
    return Catch(bug=bug, case=case, examples=report.examples, message=message)


def judge(subject: AnySubject, case: Case) -> Verdict:
    """The verdict on one case."""
    if isinstance(subject, ProjectionSubject):
        return check_projection(subject, case)
    return check(subject, case)


def planted(bug: Bug) -> AnySubject:
    """The module that the bug belongs in, with the bug. ValueError as for `plant`."""
    name, text = file_with(bug)
    match bug.target:
        case "projection":
            return replace(_clean_projection(bug.attention), module=load_text(text))
        case "triton":
            return replace(_clean(bug.attention, bug.target), module=load_text(text))
        case _:
            return cuda_subject(module_of(bug.attention, bug.target), {name: text})


def clean(bug: Bug) -> AnySubject:
    """The same module without it."""
    if bug.target == "projection":
        return _clean_projection(bug.attention)
    return _clean(bug.attention, bug.target)


def file_with(bug: Bug) -> tuple[str, str]:
    """The file of the module that the bug is in, with the bug: its name and text. ValueError as for
    `plant`.
    """
    if bug.target == "projection":
        return "", plant(text_of(projection_of(bug.attention)), bug)
    files = _files(bug.attention, bug.target)
    ending = _ENDINGS.get(bug.file, f"_{bug.file}.cu") if isinstance(bug, CudaBug) else ".py"
    name = f"{module_of(bug.attention, bug.target).variant.name}{ending}"
    return name, plant(files[name], bug)


@cache
def _files(attention: str, target: str) -> dict[str, str]:
    module = module_of(attention, target)
    source = module.variant.source
    return render_files(module, path=Path(source.path).name, sha256=digest(source))


@cache
def _clean(attention: str, target: str) -> Subject:
    return subject_of(module_of(attention, target))


@cache
def _clean_projection(name: str) -> ProjectionSubject:
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
