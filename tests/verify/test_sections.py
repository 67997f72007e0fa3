"""Sections of heads: what is said of them is what calls compute, and a case of each walk has a short one."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attnc.plan import ir
from attnc.verify.case import Case
from attnc.verify.cover import Coverage, in_sections
from attnc.verify.covering import cases_beside_the_array
from attnc.verify.problem import build
from attnc.verify.sections import Sections
from attnc.verify.subject import Subject, subject_of
from tests.by_day import each_by_day
from tests.plans import SPECS, module_of, plans_of

PATHS = sorted(SPECS.glob("*.attn"))


def made_for(name: str, target: str) -> Subject:
    return subject_of(module_of(name, target))


def in_short_sections(subject: Subject) -> list[Case]:
    """Those that come beside the array."""
    found = cases_beside_the_array(subject.space, subject.limits())
    return [case for case in found if subject.space.walks_in_short_sections(case)]


def test_a_section_ends_short_behind_two_of_several_heads() -> None:
    pairs = product(range(12), (1, 2, 4, 5))
    ends = [(heads, of) for heads, of in pairs if Sections(heads=heads, section=of).ends_short]
    assert ends == [(5, 2), (7, 2), (9, 2), (9, 4), (10, 4), (11, 2), (11, 4), (11, 5)]


@pytest.mark.parametrize(
    ("name", "target", "walks"),
    [
        ("causal_gqa", "triton", ("forward", "dq", "dkdv")),
        ("causal_gqa", "cuda.sm_80", ("forward", "backward", "backward, over keys")),
        ("causal_gqa", "cuda.sm_90a", ("backward", "backward, over keys")),
        ("decode", "triton", ()),
    ],
)
def test_walks_are_those_of_the_forward_and_of_the_backward(
    name: str, target: str, walks: tuple[str, ...]
) -> None:
    assert made_for(name, target).space.walks == walks


def test_what_is_said_of_sections_is_what_a_call_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = made_for("causal_gqa", "triton")
    asked: list[tuple[int, int]] = []
    sizes = import_module(type(subject.module.CALL).__module__.rpartition(".")[0] + ".sizes")
    compute = sizes.section

    def noted(heads: int, *given: Any) -> int:
        found: int = compute(heads, *given)
        asked.append((heads, found))
        return found

    monkeypatch.setitem(sizes._FUNCTIONS, "section", noted)
    case = in_short_sections(subject)[0]
    problem = build(subject.variant.attention, case)
    asked.clear()
    subject.run(problem.inputs, problem.outputs, case.config)
    ((heads, section),) = asked
    assert Sections(heads=heads, section=section).ends_short
    assert "forward" in subject.space.walks_in_short_sections(case)


@pytest.mark.parametrize("path", each_by_day(PATHS, of=30), ids=lambda path: path.stem)
def test_every_walk_has_a_case_that_ends_with_a_short_section(path: Path) -> None:
    """And coverage names it. One module of each attention and target."""
    seen: dict[tuple[str, str], ir.Module] = {}
    for module in plans_of(path).modules:
        if isinstance(module, ir.Module):
            seen.setdefault((module.variant.attention.name, module.target), module)
    for module in seen.values():
        subject = subject_of(module)
        space, coverage = subject.space, Coverage(subject.space)
        for case in in_short_sections(subject):
            coverage.note(case)
        met = {one.boundary.axes: one.met for one in coverage.summary.boundaries}
        assert all(met[in_sections(walk)] for walk in space.walks), module
