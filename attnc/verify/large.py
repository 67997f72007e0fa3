"""Sizes that only a GPU reaches: thousands of rows, sequences and splits, and as many heads as a grid has.

The reference takes its time here, so of a case with many heads or long rows a sample is judged: the first
piece, the last, and some between, each element of these by its bound. The rest must be no NaN, which memory
was full of. Gradients are judged where all scores of a case can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from attnc.reference import Head, heads
from attnc.reference_arrays import Array, to_arrays
from attnc.verify.boundaries import Boundary
from attnc.verify.case import Case
from attnc.verify.check import broken, with_gradients
from attnc.verify.cover import Space
from attnc.verify.problem import Problem, build
from attnc.verify.search import AttentionTrial
from attnc.verify.strategies import all_dims, free_dims, size
from attnc.verify.subject import Subject
from attnc.verify.tolerance import expected_rows
from attnc.verify.verdict import Verdict, ratio_of, to_float64

#: Scores of a case up to which gradients are judged, which need all of them.
_WITH_GRADIENTS = 1 << 26
#: Pieces that are judged, where there are more.
_PIECES = 24
#: Of an ordinary model, and of a long sequence.
_REAL, _LONG = 4097, 16385


def large_cases(space: Space) -> Iterator[Case]:
    """Long squares, both kinds of long strips, then each boundary that no small case reaches, from above."""
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
    """Free sizes that meet the points of a boundary."""
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
    """The first config that puts the boundary in force; any where only one of the backward does."""
    forward = (n for n in space.usable if boundary.is_in_force({"forward": space.configs[n]}))
    yield next(forward, space.usable[0])


def check_large(subject: Subject, case: Case) -> Verdict:
    """Runs one case and judges a sample of it. Nothing that the kernel does makes this raise."""
    attention = subject.variant.attention
    problem = build(attention, case, device=subject.device)
    try:
        subject.run(problem.inputs, problem.outputs, case.config)
    except Exception as error:
        return broken(f"{type(error).__name__}: {error}")
    if (disturbed := problem.disturbed()) is not None:
        return broken(f"memory around '{disturbed}' was written to, or the input itself")
    verdict = judge_sample(subject, problem, case)
    if verdict.ok and subject.gradients is not None and _scores(subject, case) <= _WITH_GRADIENTS:
        verdict = with_gradients(subject, case, problem, verdict)
    return verdict


def _scores(subject: Subject, case: Case) -> int:
    """The most scores that the case can have."""
    dims = all_dims(subject.variant.attention, case.dims)
    count = size(subject.variant.attention.heads_q, dims) * dims.get("B", 1)
    # what a loop over heads takes is counted as scores
    return count * (dims.get("M", 1) * dims.get("N", 1) + (1 << 17))


def judge_sample(subject: Subject, problem: Problem, case: Case) -> Verdict:
    """The verdict on the outputs of some pieces of heads, all of them where there are few."""
    attention = subject.variant.attention
    arrays = to_arrays(attention, problem.inputs)
    outputs: dict[str, Array] = {name: to_float64(value) for name, value in problem.outputs.items()}
    for name, values in outputs.items():
        if np.isnan(values).any() and case.special == "none":
            return broken(f"'{name}' has {int(np.isnan(values).sum())} elements that are NaN")
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

    def repro(self, case: Case) -> str:
        return f"{super().repro(case)} --large"
