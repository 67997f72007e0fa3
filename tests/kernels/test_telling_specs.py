"""Specs that take branches of templates which no other spec takes are right; no branch is left untaken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.strategies import free_dims
from attnc.verify.subject import subject_of
from tests.plans import plans_of
from tests.targets import skip_without_compiler
from tools.template_branches import SPECS, TELLING, described, render, watched

#: Parsing every spec would take each process that collects tests half a second.
_TARGET = re.compile(r"^schedule \w+ for ([\w.]+)", re.MULTILINE)
SUBJECTS = [
    (path, target)
    for path in sorted(TELLING.glob("*.attn"))
    for target in dict.fromkeys(_TARGET.findall(path.read_text(encoding="utf-8")))
]
#: Triton's interpreter starts at once, where other targets are compiled for seconds first.
BY_DAY = [subject for subject in SUBJECTS if subject[1] == "triton"][::3]


@pytest.mark.one_in(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "target"),
    [
        pytest.param(*at, id=f"{at[0].stem}-{at[1]}", marks=() if at in BY_DAY else pytest.mark.nightly)
        for at in SUBJECTS
    ],
)
def test_it_is_right(path: Path, target: str) -> None:
    skip_without_compiler(target)
    # several tiles of queries and of keys: those of CUDA have up to 128 queries and 128 keys
    rows = {"M": 33, "N": 100} if target == "triton" else {"M": 150, "N": 200}
    sizes = {"G": 2, "H": 2, **rows}
    for module in (module for module in plans_of(path).modules if module.target == target):
        made = subject_of(module)
        dims = {name: sizes.get(name, 1) for name in free_dims(module.variant.attention)}
        for config in range(len(module.kernel.configs)):
            case = Case(dims=dims, config=config)
            verdict = check(made, case)
            assert verdict.ok, f"{case.to_json()}\n{verdict.message}"


@pytest.mark.nightly
def test_whoever_watches_sees_the_templates_of_every_target() -> None:
    """Also where the same templates were read before."""
    seen = []
    for _ in range(2):
        with watched() as branches:
            render([TELLING / "holes.attn"])
        seen.append(branches.seen)
    assert seen[0] == seen[1]
    assert {condition.template.split("/")[0] for condition in seen[0]} == {"triton", "cuda", "sm90"}


@pytest.mark.nightly
def test_every_branch_of_a_template_is_taken() -> None:
    """`python -m tools.template_branches` lists those that are not, with their lines."""
    with watched() as branches:
        render(SPECS)
    untaken = sorted(map(described, branches.unmet()))
    assert not untaken, "these branches want a spec in tests/telling_specs, or to be deleted"
