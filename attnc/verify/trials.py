"""A planned module of a spec, be it an attention's or a projection's, as a trial."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnc.plan import ir
from attnc.plan.ir.projection import ProjectionModule
from attnc.verify.agreement import across
from attnc.verify.corpus import corpus
from attnc.verify.large import LargeTrial
from attnc.verify.projection_check import ProjectionTrial, projection_subject
from attnc.verify.properties import violations
from attnc.verify.search import AttentionTrial, Trial
from attnc.verify.subjects import subject_of


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
