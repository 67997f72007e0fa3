"""A planned module of a spec, be it an attention's or a projection's, as a trial; with what a trial of
an attention may bring along: modules for other targets that must agree, and a corpus of cases.

Failures once found stay: beside a spec, `cases/NAME.json` keeps them under version control, by attention,

    {"ATTENTION": [{"why": "what it showed", "case": {...}}]}

and what `attnc fuzz` finds lies in a folder of failures until it is moved there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from attnc.model.attention import Variant
from attnc.plan import ir
from attnc.plan.projection import ProjectionModule
from attnc.verify.case import Case, Fit
from attnc.verify.check import Rules
from attnc.verify.large import LargeTrial
from attnc.verify.problem import Problem, build
from attnc.verify.projection_check import ProjectionTrial, projection_subject
from attnc.verify.properties import violations
from attnc.verify.search import AttentionTrial, Trial
from attnc.verify.subject import Subject
from attnc.verify.subjects import subject_of
from attnc.verify.tolerance import expect
from attnc.verify.verdict import judge, to_float64


def trial_of(
    module: ir.Module | ProjectionModule,
    text: str | None = None,
    *,
    large: bool = False,
    failures: Path | None = None,
    peers: Iterable[ir.Module] = (),
) -> Trial:
    """Loads the module, or this text of it. large: its large cases; failures: a folder of cases that come
    first; peers: modules for other targets, which must compute the same. ValueError for a file of cases that
    is none.
    """
    if isinstance(module, ProjectionModule):
        return ProjectionTrial(projection_subject(module, text))
    subject = subject_of(module, text)
    if large:
        return LargeTrial(subject)
    others = {peer.target: subject_of(peer) for peer in peers}
    trial = AttentionTrial(subject, across(others) if others else violations)
    if failures is not None:
        trial.replay = corpus(module.variant, trial.fit, failures)
    return trial


def across(peers: Mapping[str, Subject]) -> Rules:
    """The rule that a subject agrees with its peers, which are the same variant on other targets by name."""

    def disagreements(subject: Subject, case: Case) -> Iterator[str]:
        own = run(subject, case)
        for target, peer in peers.items():
            other = run(peer, replace(case, config=case.config % len(peer.configs)))
            attention = peer.variant.attention
            verdict = judge(attention, expect(attention, other.inputs, peer.bound), other.outputs)
            if not verdict.ok:
                yield f"{target}: {verdict.message}"
            elif (message := difference(subject, own, peer, other)) is not None:
                yield f"{target}: {message}"

    return disagreements


def run(subject: Subject, case: Case) -> Problem:
    """The case, run."""
    problem = build(subject.variant.attention, case, device=subject.device)
    subject.run(problem.inputs, problem.outputs, case.config)
    return problem


def difference(left: Subject, one: Problem, right: Subject, other: Problem) -> str | None:
    """Which output of two runs of one case differs by more than both bounds allow."""
    bounds = [expect(s.variant.attention, one.inputs, s.bound) for s in (left, right)]
    for name in one.outputs:
        a, b = to_float64(one.outputs[name]), to_float64(other.outputs[name])
        allowed = bounds[0][name].allowed + bounds[1][name].allowed
        free = bounds[0][name].open | bounds[1][name].open
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b)) | free)
        if wrong.any():
            return f"'{name}' differs in {int(wrong.sum())} of {wrong.size} elements"
    return None


def corpus(variant: Variant, fit: Fit, failures: Path) -> tuple[Case, ...]:
    """The cases of this variant, each once; those of a spec that has changed since are left out. Raises
    ValueError for a file that is none.
    """
    found = {case.to_json(): case for case in (*_beside(variant), *_found(variant, failures))}
    return tuple(case for case in found.values() if fit.misfit(case) is None)


def file_of(variant: Variant) -> Path:
    """Names the file in which the cases of a spec are kept."""
    spec = Path(variant.source.path)
    return spec.parent / "cases" / f"{spec.stem}.json"


def _beside(variant: Variant) -> Iterator[Case]:
    path = file_of(variant)
    if not path.is_file():
        return
    try:
        for entry in json.loads(path.read_text(encoding="utf-8")).get(variant.attention.name, ()):
            yield Case.from_json(json.dumps(entry["case"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of cases: {error}") from None


def _found(variant: Variant, failures: Path) -> Iterator[Case]:
    for path in sorted(failures.glob(f"{variant.attention.name}-{variant.name}-*.json")):
        try:
            yield Case.from_json(path.read_text(encoding="utf-8"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a case: {error}") from None
