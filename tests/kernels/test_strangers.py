"""Attentions as people write them who have not read the compiler: gates, tables, temperatures, logarithms,
positions, several masks, with the gradients of every input, on every target.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnc.build import plan_program, schedule_all
from attnc.diagnostics import DiagnosticError
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.data import styles_for
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject, subject_of
from tests.profiles import is_night
from tests.targets import skip_without_compiler

STRANGERS = Path(__file__).parents[1] / "strangers"
#: Their texts by name. None has a schedule: kernels are those of `attnc.compile`.
TEXTS = {
    match[1]: match[0]
    for path in sorted(STRANGERS.glob("*.attn"))
    for match in re.finditer(r"^attention (\w+) \{$.*?^\}$", path.read_text(encoding="utf-8"), re.M | re.S)
}


def subject_for(name: str, target: str) -> Subject:
    """The module of an attention for a target. Ends the test where that has no kernels for it."""
    program = resolve(parse(Source(f"{name}.attn", TEXTS[name])), prelude())
    try:
        scheduled, _ = schedule_all(program, (target,))
    except DiagnosticError:
        assert target != "triton"
        pytest.skip(f"{target} has no kernels for it")
    return subject_of(plan_program(scheduled).modules[0])


@pytest.mark.one_in(70)
@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", "cuda.sm_80", "cuda.sm_90a"])
@pytest.mark.parametrize("name", TEXTS)
def test_what_a_stranger_writes_is_right(name: str, target: str) -> None:
    skip_without_compiler(target)
    made = subject_for(name, target)
    attention = made.variant.attention
    rows = {"M": 33, "N": 50} if target == "triton" else {"M": 70, "N": 90}
    sizes = {"B": 2, "H": 2, "Hkv": 2, "G": 2, **rows}
    dims = {one: sizes.get(one, 4) for one in free_dims(attention)}
    styles = styles_for(attention)
    for seed, extras in enumerate(styles if is_night() else dict.fromkeys((styles[0], styles[-1]))):
        case = Case(dims=dims, seed=seed, extras=extras)
        verdict = check(made, case)
        assert verdict.ok, f"{case.to_json()}\n{verdict.message}"
