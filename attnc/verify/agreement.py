"""One spec on several targets: kernels of different templates, compilers and machines must agree.

Two outputs may differ by the sum of the bounds that their plans promise. Each being within its bound of the
reference implies it; what is compared here does not rest on the reference at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from attnc.verify.case import Case
from attnc.verify.check import Rules
from attnc.verify.problem import Problem, build
from attnc.verify.subject import Subject
from attnc.verify.tolerance import expect
from attnc.verify.verdict import judge, to_float64


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
