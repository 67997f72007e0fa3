"""The large tier, on small cases: what it would run, and that its judgement is one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnc.verify.case import Case
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import check_large, large_cases
from tests.plans import plans_of

SPECS = Path(__file__).parents[2] / "specs"


@cache
def subject(name: str) -> Subject:
    return subject_of(plans_of(SPECS / f"{name}.attn").modules[0])


@pytest.mark.parametrize(
    ("name", "dim", "size"),
    [
        ("causal_gqa", "M", 4097),
        ("causal_gqa", "Hkv", 65536),
        ("decode", "Hkv", 65537),
        ("document", "N", 16385),
        ("varlen", "B", 128),
        ("varlen", "B", 16384),
        ("decode", "N", 65552),
        ("paged_decode", "N", 16 * 4097),
    ],
)
def test_cases_reach_what_is_large(name: str, dim: str, size: int) -> None:
    cases = list(large_cases(subject(name).space))
    assert size in {case.dims[dim] for case in cases}
    assert len({case.to_json() for case in cases}) == len(cases) <= 60


CASE = Case(dims={"B": 2, "M": 40, "N": 30, "H": 2})


def test_right_results_are_judged_right() -> None:
    verdict = check_large(subject("prefix_lm"), CASE)
    assert verdict.ok, verdict.message
    assert verdict.worst > 0.1


@pytest.mark.parametrize(("change", "said"), [(1.0, "is off"), (float("nan"), "that are NaN")])
def test_wrong_results_are_found(change: float, said: str) -> None:
    real = subject("prefix_lm")

    def wrong(*given: object, out: object, config: object) -> None:
        real.module.prefix_lm(*given, out=out, config=config)
        out[1, 39, 1, 3] += change  # type: ignore[index]  # a tensor

    module = SimpleNamespace(CONFIGS=real.module.CONFIGS, prefix_lm=wrong)
    made = Subject(variant=real.variant, bound=real.bound, module=module)  # type: ignore[arg-type]  # has what is used
    assert said in check_large(made, CASE).message
