"""A second look at what survived: do its bits ever change, are changes rounding, and is its line ever run?

The mutant and the original run side by side on more cases than `attnc verify` has, and on large ones. Bits
that never change make a mutant *equal*, those that change within the bound of every element *rounding*. What
leaves a bound here is *wrong*: verification has not seen it. A mutant whose line no case runs is *unreached*:
nothing is known of it. A line is run if a launch ends there that is made to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import torch

from attnc.verify.case import Case
from attnc.verify.check import run_backward
from attnc.verify.covering import covering_cases
from attnc.verify.problem import build
from attnc.verify.properties import result_violations
from attnc.verify.search import AttentionTrial, Step
from attnc.verify.subject import Subject
from attnc.verify.trials import LargeTrial, large_cases
from attnc.verify.verdict import Verdict
from tools.mutants.judge import COUNT, Bench, Judgment, judge_message, take
from tools.mutants.operators import Mutant
from tools.mutants.remember import keep
from tools.mutants.sample import texts_of
from tools.mutants.syntax import add_trap
from tools.mutants.turns import turn_for

#: Cases in place of those of the default budget, and large ones.
_CASES, _LARGE = 2 * COUNT, 8
#: Of the large cases whose bits change so many are judged: their references take seconds.
_JUDGED = 2
#: Digests of a case's results by their names; a message where a kernel raises.
_Bits: TypeAlias = Mapping[str, str] | str


def examine(bench: Bench, mutant: Mutant) -> Judgment:
    """Compares a mutant that survived with the original."""
    subject, changed, ran = bench.subject(mutant), 0, 0
    bench.examined = subject
    trial = AttentionTrial(subject)
    for case in _cases(bench):
        ran += 1
        if _find_bits(subject, case) == _known_bits(bench, case):
            continue
        changed += 1
        verdict = take(trial, Step(case=case, fills=("nan",), is_held=False))
        if not verdict.ok:
            return _wrong(case, verdict, ran)
    large, judged = LargeTrial(replace(subject, gradients=None)), 0
    for case in islice(large_cases(bench.original.space), _LARGE if subject.device == "cuda" else 0):
        ran += 1
        if _find_bits(subject, case, with_gradients=False) == _known_bits(bench, case, with_gradients=False):
            continue
        changed, judged = changed + 1, judged + 1
        if judged > _JUDGED:
            continue
        verdict = take(large, Step(case=case, fills=("nan",), is_held=False))
        if not verdict.ok:
            return _wrong(case, verdict, ran)
    if changed:
        message = f"the bits of {changed} of {ran} cases change, within every bound"
        return Judgment(outcome="rounding", cases=ran, message=message)
    return Judgment(outcome="equal", cases=ran, message=f"no bit changes in {ran} cases")


def _wrong(case: Case, verdict: Verdict, ran: int) -> Judgment:
    return Judgment(outcome="wrong", cases=ran, message=f"{case.to_json()}: {verdict.message}"[:900])


def _cases(bench: Bench) -> Iterator[Case]:
    """Yields the cases of the default budget, and others. Tensors that span gigabytes have been seen."""
    known = {step.case.to_json() for step in bench.steps}
    yield from (step.case for step in bench.steps if not step.case.is_far)
    for case in covering_cases(bench.original.space, bench.original.limits(), _CASES):
        if case.to_json() not in known:
            yield case


def _known_bits(bench: Bench, case: Case, *, with_gradients: bool = True) -> _Bits:
    """Returns the original's, which are kept."""
    name = hashlib.sha256(f"{with_gradients} {case.to_json()}".encode()).hexdigest()
    return keep(
        bench.folder / f"{name}.bits",
        lambda: _find_bits(bench.original, case, with_gradients=with_gradients),
    )


def _find_bits(subject: Subject, case: Case, *, with_gradients: bool = True) -> _Bits:
    """Returns digests of what a case comes to; of what the order of programs decides, none."""
    try:
        with turn_for(case):
            found = _run(subject, case, with_gradients)
    except torch.OutOfMemoryError:  # says nothing of the mutant
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {
        name: hashlib.sha256(_bytes_of(value)).hexdigest()
        for name, value in found.items()
        if name.removeprefix("d") not in subject.atomic
    }


def _bytes_of(value: torch.Tensor) -> bytes:
    dense = value.detach().flatten().clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8).cpu().numpy().tobytes()


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


def find_reach(bench: Bench, mutant: Mutant, judgment: Judgment) -> Judgment:
    """Returns the judgment that no bit changes, unless no case runs the mutant's line: then that no machine
    code changes that was launched, or that nothing is known. It may end this process, as the line does then.
    """
    if _is_reached(bench, mutant):
        return judgment
    subject = bench.examined
    if (
        subject is not None
        and subject.device == "cuda"
        and bench.is_same_where_launched(subject, mutant.file)
    ):
        return replace(judgment, outcome="same code", message="in all that is launched")
    return replace(judgment, outcome="unreached")


def _is_reached(bench: Bench, mutant: Mutant) -> bool:
    """Returns whether a case shows that the mutant's line was made to end a launch."""
    text = texts_of(bench.place)[mutant.file]
    trapped = add_trap(text, mutant.file, mutant.start)
    if trapped is None:
        return False
    subject = bench.subject(replace(mutant, start=0, stop=len(text.encode()), old=text, new=trapped))
    trial = AttentionTrial(subject, result_violations)
    for step in bench.steps:
        verdict = take(trial, step)
        if not verdict.ok:
            return judge_message(verdict.message, 0).outcome != "invalid"
    return False
