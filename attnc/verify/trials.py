"""A planned module of a spec, be it an attention's or a projection's, as a trial; with what a trial of an
attention may bring along: modules for other targets that must agree, and a corpus of cases.

A large trial has sizes that only a GPU reaches: thousands of rows, sequences and splits, and as many heads as
a grid has. The reference takes its time there, so of a case with many heads or long rows a sample is judged:
the first piece, the last, and some between, each element of these by its bound. The rest must be no NaN,
which memory was full of. Gradients are judged where all scores of a case can be.

Failures once found stay: beside a spec, `cases/NAME.json` keeps them under version control, by attention,

    {"ATTENTION": [{"why": "what it showed", "case": {...}, "rule": "what it broke besides the bound"}]}

and what `attnc fuzz` finds lies in a folder of failures until it is moved there. Each runs again beside the
other cases, held to the rule that it broke.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from attnc.plan import ir
from attnc.plan.projection import ProjectionModule
from attnc.plan.targets import TARGETS
from attnc.reference import Array, Head, heads, to_arrays
from attnc.runtime.trial import problem_for
from attnc.source import Source
from attnc.verify.boundaries import Boundary
from attnc.verify.case import Case, Kept
from attnc.verify.check import Rules, report_broken, with_gradients
from attnc.verify.cover import Space
from attnc.verify.problem import Problem, build
from attnc.verify.projection_check import ProjectionTrial, projection_subject
from attnc.verify.properties import rule_names, violations
from attnc.verify.search import AttentionTrial, Trial
from attnc.verify.simulated import simulate_beside
from attnc.verify.strategies import all_dims, free_dims, size
from attnc.verify.subject import Subject, place, subject_of
from attnc.verify.tolerance import expect, expected_rows, to_float64
from attnc.verify.verdict import Verdict, apart, judge, ratio_of


def trial_of(
    module: ir.Module | ProjectionModule,
    text: str | None = None,
    *,
    large: bool = False,
    failures: Path | None = None,
    peers: Iterable[ir.Module] = (),
    are_compared: bool = False,
) -> Trial:
    """Loads the module, or this text of it. large: its large cases; failures: a folder of those that were
    kept, to run again; peers: modules for other targets; are_compared: whether cases must give the same
    there, in place of other rules. ValueError for a file of cases that is none.
    """
    if large and not isinstance(module, ProjectionModule):
        return LargeTrial(subject_of(module, text))
    trial: Trial
    if isinstance(module, ProjectionModule):
        trial, name = ProjectionTrial(projection_subject(module, text)), module.name
    else:
        subject, others = subject_of(module, text), {peer.target: peer for peer in peers}
        rules = (
            across({name: subject_of(peer) for name, peer in others.items()}) if are_compared else violations
        )
        trial = AttentionTrial(subject, rules, rule_of=partial(rule_of, others))
        trial.simulated = simulate_beside(subject, module, text)
        name = module.variant.attention.name
    if failures is not None:
        trial.kept = corpus(trial, module.variant.source, name, failures)
    return trial


def rule_of(peers: Mapping[str, ir.Module], name: str) -> Rules | None:
    """Returns a rule by the name that a broken one had: that a peer computes the same, or a property; all
    properties where none has the name. None for a target that is no peer.
    """
    if name in peers:
        return across({name: subject_of(peers[name])})
    if name in TARGETS:
        return None
    return partial(violations, only=name if name in rule_names() else "")


def across(peers: Mapping[str, Subject]) -> Rules:
    """Returns the rule that a subject agrees with its peers, which are the same variant on other targets by
    name.
    """

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
    problem = build(subject.variant.attention, case, device=subject.device)
    subject.run(problem.inputs, problem.outputs, case.config)
    return problem


def difference(left: Subject, one: Problem, right: Subject, other: Problem) -> str | None:
    """Returns which output of two runs of one case differs by more than both bounds allow."""
    bounds = [expect(s.variant.attention, one.inputs, s.bound) for s in (left, right)]
    for name in one.outputs:
        wants = bounds[0][name], bounds[1][name]
        wrong = apart(wants, to_float64(one.outputs[name]), to_float64(other.outputs[name]))
        if wrong.any():
            return f"'{name}' differs in {int(wrong.sum())} of {wrong.size} elements"
    return None


# --- cases that are kept ------------------------------------------------------------------------------------


def corpus(trial: Trial, spec: Source, name: str, failures: Path) -> tuple[Kept, ...]:
    """Returns the cases that are kept of a trial, each once: those in the file of its spec, under this name,
    and those in the folder, whatever target failed; those of a spec that has changed since are left out.
    Raises ValueError for a file that is none.
    """
    found = {
        (kept.case.to_json(), kept.rule): kept
        for kept in (*_cases_of_spec(file_of(spec), name), *_failures_in(failures, trial.name))
    }
    return tuple(kept for kept in found.values() if trial.fit.misfit(kept.case) is None)


def file_of(source: Source) -> Path:
    """Names the file in which the cases of a spec are kept."""
    spec = Path(source.path)
    return spec.parent / "cases" / f"{spec.stem}.json"


def _cases_of_spec(path: Path, name: str) -> Iterator[Kept]:
    if not path.is_file():
        return
    try:
        for entry in json.loads(path.read_text(encoding="utf-8")).get(name, ()):
            yield Kept.from_json(json.dumps({"case": entry["case"], "rule": entry.get("rule", "")}))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of cases: {error}") from None


def _failures_in(folder: Path, name: str) -> Iterator[Kept]:
    for path in sorted(folder.glob(f"{name}-*.json")):
        try:
            yield Kept.from_json(path.read_text(encoding="utf-8"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a case: {error}") from None


# --- sizes that only a GPU reaches --------------------------------------------------------------------------


#: Scores of a case up to which gradients are judged, which need all of them.
_WITH_GRADIENTS = 1 << 26
#: Pieces that are judged, where there are more.
_PIECES = 24
#: Of an ordinary model, and of a long sequence.
_REAL, _LONG = 4097, 16385


def large_cases(space: Space) -> Iterator[Case]:
    """Yields long squares, both kinds of long strips, then each boundary that no small case reaches, from
    above.
    """
    names = free_dims(space.attention)
    extras = "many" if "many" in space.factors.get("extras", ()) else "drawn"
    lengths = "full" if "full" in space.factors.get("lengths", ()) else "drawn"
    found: list[tuple[dict[str, int], int]] = []
    decodes = space.plan is not None and space.plan.kernel.structure == "decode"
    shapes = ((1, _LONG), (3, 65552)) if decodes else ((_REAL, _REAL), (129, _LONG), (_LONG, 129))
    found += [({"M": m, "N": n, "G": 2, "Hkv": 2 if decodes else 1}, space.usable[0]) for m, n in shapes]
    found.append(({"M": 300, "N": 700, "B": 3, "H": 12, "Hkv": 4, "G": 3}, space.usable[-1]))
    for boundary in space.boundaries:
        if boundary.reach != "default":
            found += [(sizes, config) for sizes in _sizes(boundary) for config in _configs(space, boundary)]
    seen = set()
    for number, (sizes, config) in enumerate(found):
        dims = {name: sizes.get(name, 1) for name in names}
        case = Case(dims=dims, config=config, extras=extras, lengths=lengths)
        if case.to_json() not in seen:
            seen.add(case.to_json())
            yield replace(case, seed=number, lengths="drawn" if "B" in sizes else lengths)


def _sizes(boundary: Boundary) -> Iterator[dict[str, int]]:
    for point in boundary.points:
        match boundary.quantity:
            case "rows" | "packed":
                yield {"M": point, "N": 65}
            case "keys" | "entries":
                yield {"M": 3, "N": point}
            case "columns":
                yield {"M": 1, "N": 16 * point}
            case "sequences":
                yield {"B": point, "M": 3, "N": 5}
            case "heads":
                yield {"M": 1, "N": 2, "H": point, "Hkv": point}
            case "splits":
                yield {"M": 1, "N": 64 * point}


def _configs(space: Space, boundary: Boundary) -> Iterator[int]:
    forward = (n for n in space.usable if boundary.is_in_force({"forward": space.configs[n]}))
    yield next(forward, space.usable[0])


def check_large(subject: Subject, case: Case) -> Verdict:
    """Runs one case and judges a sample of it. Nothing that the kernel does makes this raise; see `check`."""
    attention = subject.variant.attention
    problem = build(attention, case, device=subject.device)
    try:
        subject.run(problem.inputs, problem.outputs, case.config)
    except OSError:
        raise
    except Exception as error:
        return report_broken(f"{type(error).__name__}: {error}")
    if (disturbed := problem.find_disturbed()) is not None:
        return report_broken(f"memory around '{disturbed}' was written to, or the input itself")
    verdict = judge_sample(subject, problem, case)
    if verdict.ok and subject.gradients is not None and _scores(subject, case) <= _WITH_GRADIENTS:
        verdict = with_gradients(subject, case, problem, verdict)
    return verdict


def _scores(subject: Subject, case: Case) -> int:
    dims = all_dims(subject.variant.attention, case.dims)
    count = size(subject.variant.attention.heads_q, dims) * dims.get("B", 1)
    # what a loop over heads takes is counted as scores
    return count * (dims.get("M", 1) * dims.get("N", 1) + (1 << 17))


def judge_sample(subject: Subject, problem: Problem, case: Case) -> Verdict:
    """Returns the verdict on the outputs of some pieces of heads, all of them where there are few."""
    attention = subject.variant.attention
    arrays = to_arrays(attention, problem.inputs)
    outputs: dict[str, Array] = {name: to_float64(value) for name, value in problem.outputs.items()}
    for name, values in outputs.items():
        if np.isnan(values).any() and case.special == "none":
            return report_broken(f"'{name}' has {int(np.isnan(values).sum())} elements that are NaN")
    count = sum(1 for _ in heads(attention, arrays))
    order = np.random.default_rng(case.seed).permutation(count)
    chosen = {0, count - 1, *map(int, order[:_PIECES])}
    worst, where, off = 0.0, "", 0
    for number, head in enumerate(heads(attention, arrays)):
        if number not in chosen:
            continue
        for name, want in expected_rows(head, subject.bound).items():
            if name not in outputs:
                continue
            ratio = ratio_of(want, np.asarray(head.place(attention.tensor(name), outputs)))
            off += int((ratio > 1).sum())
            if ratio.size and ratio.max() > worst:
                worst, where = float(ratio.max()), _where(name, head, ratio)
    message = "within the bound" if worst <= 1 else f"{where} is off ({off} of a sample of elements are)"
    return Verdict(ok=worst <= 1, message=message, worst=worst, where=where)


def _where(name: str, head: Head, ratio: Array) -> str:
    row, column = np.unravel_index(int(ratio.argmax()), ratio.shape)
    feature = f", d={int(column)}" if name == "o" else ""
    return f"{name}[b={head.b}, q_idx={head.first + int(row)}, h={head.h}{feature}]"


class LargeTrial(AttentionTrial):
    """The large cases of an attention in place of the small ones."""

    def cases(self, count: int) -> Iterable[Case]:
        return large_cases(self.subject.space)

    def check(self, case: Case, fills: Iterable[str]) -> Verdict:
        return check_large(self.subject, case)

    def verdict(self, case: Case) -> Verdict:
        return check_large(self.subject, case)

    def repro(self, case: Case, rule: str = "") -> str:
        return f"{super().repro(case, rule)} --large"


# --- one run, for `attnc demo` ------------------------------------------------------------------------------


#: Lengths that cross tile borders: on a GPU, and small enough for an interpreter.
_LENGTHS = {"cuda": 2048, "cpu": 160}
_SEQUENCES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rehearsal found: where it ran, on what, how long the call took (with compilation), and whether
    it was right.
    """

    device: str
    shapes: str
    seconds: float
    verdict: Verdict


def rehearse(module: ir.Module) -> Outcome:
    """Runs the module on the GPU, or without one on the CPU, and judges its outputs."""
    subject = subject_of(module)
    attention, device = module.variant.attention, subject.device
    length = _LENGTHS[device]
    tensors = problem_for(module, length, device=device, tokens=_SEQUENCES * length)
    function = getattr(subject.module, attention.name)
    begin = time.perf_counter()
    result = function(*tensors)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    outputs = result if isinstance(result, tuple) else (result,)
    arguments = dict(zip((arg.tensor.name for arg in module.args), tensors, strict=True))
    expected = expect(attention, arguments, module.kernel.bound)
    named = dict(zip((arg.tensor.name for arg in module.outputs), outputs, strict=True))
    return Outcome(
        device=place(subject) if device == "cuda" else f"{place(subject)} (there is no GPU)",
        shapes=", ".join(f"{key} {list(arguments[key].shape)}" for key in ("q", "k")),
        seconds=seconds,
        verdict=judge(attention, expected, named),
    )
