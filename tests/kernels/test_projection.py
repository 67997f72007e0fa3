"""Projections in the interpreter: the fixed cases, arguments that are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.plan.projection import ProjectionModule
from attnc.runtime.loader import load_text
from attnc.verify.case import Case
from attnc.verify.projection_check import (
    ProjectionSubject,
    ProjectionTrial,
    check_projection,
    projection_subject,
    text_of,
)
from attnc.verify.search import run, search
from tests.plans import plans_of
from tests.planted.bug import plant
from tests.planted.registry import BUGS
from tests.verify.judging import examples


@cache
def modules() -> tuple[ProjectionModule, ...]:
    return plans_of("linear").projections


@cache
def subject(name: str, variant: str) -> ProjectionSubject:
    found = (m for m in modules() if (m.name, m.variant.name) == (name, variant))
    return projection_subject(next(found))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param("linear", "bf16", marks=pytest.mark.nightly),
        ("linear", "f16"),
        ("linear", "f32"),
        ("linear_bias", "bf16"),
        pytest.param("linear_bias", "f16", marks=pytest.mark.nightly),
    ],
)
def test_the_fixed_cases(name: str, variant: str) -> None:
    report = run(ProjectionTrial(subject(name, variant)), count=13, fills=("nan", "large"))
    assert not report.failures
    assert report.examples > 13  # those that meet the boundaries of the plan come first
    assert 0 < report.worst <= 1


def test_what_a_call_allocates_is_full_of_nan() -> None:
    """Sums that nobody has written show, where fresh memory is mostly 0."""

    def forget(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor, config: Any) -> None:
        splits = torch.empty(2, *out.shape)
        splits[0] = x.float() @ w.float().T
        out.copy_(splits.sum(0))

    sound = subject("linear", "f16")
    module: Any = SimpleNamespace(CONFIGS=sound.module.CONFIGS, linear=forget)
    verdict = check_projection(replace(sound, module=module), Case(dims={"M": 2, "N": 3, "K": 16}))
    assert verdict.message.startswith("y[m=0, n=0] = nan"), verdict.message


@pytest.mark.slow
def test_drawn_cases() -> None:
    report = search(ProjectionTrial(subject("linear_bias", "bf16")), examples=examples(10))
    assert not report.failures


@pytest.mark.nightly
@pytest.mark.slow
def test_a_layer_of_the_7b_model_at_one_row() -> None:
    """As large as it is, with tiles that are never ragged."""
    planned = plans_of("llama_7b").projections[1]
    flat = next(at for at, config in enumerate(planned.configs) if config.impl == "flat")
    case = Case(dims={"M": 1, "N": 4096, "K": 4096}, config=flat)
    assert check_projection(projection_subject(planned), case).ok


def test_failures_are_shrunk_and_print_a_command() -> None:
    bug = BUGS["projections: bias lost when K is shared"]
    planned = next(module for module in modules() if module.name == bug.attention)
    broken = replace(projection_subject(planned), module=load_text(plant(text_of(planned), bug)))
    (failure,) = search(ProjectionTrial(broken), examples=60).failures
    assert failure.case.dims["M"] == 1
    assert f"--attention {bug.attention} --variant bf16 --case '" in failure.repro


def test_arguments_are_checked() -> None:
    linear = subject("linear", "bf16").module.linear
    x, w = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(3, 32, dtype=torch.bfloat16)
    for arguments, message in (
        ((x.float(), w), "x: expected dtype torch.bfloat16"),
        ((x, w[:, :16]), "w: expected shape [any, 32], got [3, 16]"),
        ((x.T, w), "w: expected shape"),
        ((x, w.T.contiguous().T), "w: expected a contiguous last axis"),
        (([1.0], w), "x: expected a tensor"),
    ):
        with pytest.raises((TypeError, ValueError)) as failure:
            linear(*arguments)
        assert message in str(failure.value)
    with pytest.raises(ValueError, match="out: expected shape"):
        linear(x, w, out=torch.empty(2, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out y: expected an element of memory for each value"):
        linear(x, w, out=torch.empty(1, len(w), dtype=torch.bfloat16).expand(len(x), -1))
    with pytest.raises(TypeError, match="config: expected one of CONFIGS"):
        linear(x, w, config="flat")
    with pytest.raises(RuntimeError, match="has no backward"):
        linear(x, w.clone().requires_grad_())


def test_results_are_written_to_out() -> None:
    linear = subject("linear", "f16").module.linear
    x, w = torch.randn(3, 40).half(), torch.randn(5, 40).half()
    y = torch.full((3, 8), 7.0).half()[:, :5]
    assert linear(x, w, out=y) is y
    torch.testing.assert_close(y.float(), x.float() @ w.float().T, atol=2e-2, rtol=2e-3)
    assert linear(x[:0], w).shape == (0, 5)
    rows = torch.zeros(3, 45).half()
    linear(rows[:, :40], w, out=rows[:, 40:])
    with pytest.raises(ValueError, match=r"^out y: expected memory of its own, .* those of x"):
        linear(rows[:, :40], w, out=rows[:, 39:44])


def test_more_rows_than_a_grid_has_are_refused() -> None:
    made = subject("linear", "f16").module
    x, w = torch.ones(1, 32).half().expand(4 * 65535 + 1, -1), torch.ones(1, 32).half()
    gemv = next(config for config in made.CONFIGS if config.impl == "gemv")
    with pytest.raises(ValueError, match=r"x: expected at most 262140 rows .* 'gemv', got 262141"):
        made.linear(x, w, config=gemv)
