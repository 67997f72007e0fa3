"""A second look at what survived: do its bits ever change, are changes rounding, and is its line ever run?

The mutant and the original run side by side on more cases than `attnc verify` has, and on large ones. Bits
that never change make a mutant *equal*, those that change within the bound of every element *rounding*. What
leaves a bound here is *wrong*: verification has not seen it. A mutant whose line no case runs is *unreached*:
nothing is known of it. A line is run if a launch ends there that is made to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import torch

from attnc.verify.case import Case
from attnc.verify.check import check, run_backward, same_bits
from attnc.verify.covering import covering_cases
from attnc.verify.problem import build
from attnc.verify.properties import violations
from attnc.verify.search import AttentionTrial, Step
from attnc.verify.subject import Subject
from attnc.verify.trials import LargeTrial, large_cases
from tools.mutants.judge import COUNT, Bench, Judgment, judge_message, room_for, take
from tools.mutants.operators import Mutant
from tools.mutants.sample import texts_of
from tools.mutants.syntax import add_trap

#: Cases in place of those of the default budget, and large ones.
_CASES, _LARGE = 3 * COUNT, 8


def examine(bench: Bench, mutant: Mutant) -> Judgment:
    """Compares a mutant that survived with the original."""
    subject, changed, ran = bench.subject(mutant), 0, 0
    space = bench.original.space
    for case in _cases(bench):
        ran += 1
        message = _find_change(bench.original, subject, case)
        if message is None:
            continue
        changed += 1
        verdict = check(subject, case)
        if not verdict.ok:
            return Judgment(outcome="wrong", cases=ran, message=f"{case.to_json()}: {verdict.message}"[:900])
    trial = LargeTrial(subject)
    for case in islice(large_cases(space), _LARGE if subject.device == "cuda" else 0):
        ran += 1
        if _find_change(bench.original, subject, case, with_gradients=False) is None:
            continue
        changed += 1
        verdict = take(trial, Step(case=case, fills=("nan",), is_held=False))
        if not verdict.ok:
            return Judgment(
                outcome="wrong", cases=ran, message=f"large {case.to_json()}: {verdict.message}"[:900]
            )
    if changed:
        return Judgment(outcome="rounding", cases=ran, message=f"the bits of {changed} cases change")
    reached = _find_reach(bench, mutant)
    return Judgment(outcome="equal" if reached else "unreached", cases=ran, message=reached)


def _cases(bench: Bench) -> Iterator[Case]:
    """Yields the cases of the default budget, and others."""
    known = {step.case.to_json() for step in bench.steps}
    yield from (step.case for step in bench.steps)
    for case in covering_cases(bench.original.space, bench.original.limits(), _CASES):
        if case.to_json() not in known:
            yield case


def _find_change(
    original: Subject, mutant: Subject, case: Case, *, with_gradients: bool = True
) -> str | None:
    """Returns which result of a case has other bits; None where none has. Whatever a mutant raises is one."""
    with room_for(case):
        own = _run(original, case, with_gradients)
        try:
            other = _run(mutant, case, with_gradients)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    for name, value in own.items():
        if name.removeprefix("d") not in original.atomic and not same_bits(value, other[name]):
            return name
    return None


def _run(subject: Subject, case: Case, with_gradients: bool) -> Mapping[str, torch.Tensor]:
    attention = subject.variant.attention
    problem = build(attention, case, device=subject.device)
    subject.run(problem.inputs, problem.outputs, case.config, case.call)
    found = dict(problem.outputs)
    is_affordable = subject.limits().includes_gradients(case.dims, case.config)
    if with_gradients and subject.gradients is not None and case.special == "none" and is_affordable:
        gradients, _ = run_backward(subject, problem, case)
        found |= {f"d{name}": value for name, value in gradients.items()}
    return found


def _find_reach(bench: Bench, mutant: Mutant) -> str:
    """Says how a line that is made to end a launch shows; "" where it does not."""
    text = texts_of(bench.place)[mutant.file]
    trapped = add_trap(text, mutant.file, mutant.start)
    if trapped is None:
        return ""
    subject = bench.subject(replace(mutant, start=0, stop=len(text.encode()), new=trapped))
    trial = AttentionTrial(subject, violations)
    for step in bench.steps:
        verdict = take(trial, step)
        if not verdict.ok:
            found = judge_message(verdict.message, 0)
            return f"reached: {found.message[:60]}" if found.outcome != "invalid" else ""
    return ""
