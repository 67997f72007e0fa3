"""What forms of normalisation differ in, in backward kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from attnc.expr.nodes import TRUE
from attnc.model.attention import Form
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.triton.backward_forms import BACKWARD_FORMS, BackwardFormText, cite_lines
from attnc.target.triton.printer import tiled
from tests.plans import plans_of


def kernel_of(form: Form) -> BackwardKernel:
    module = next(module for module in plans_of("causal_gqa").modules if module.target == "triton")
    kernel = next(iter(module.backward_kernels.values()))
    step = replace(kernel.step, keep=TRUE)
    return replace(kernel, softmax=replace(kernel.softmax, form=form), step=step)


def form_of(form: Form, *, clears: bool = False) -> BackwardFormText:
    return BACKWARD_FORMS[form](
        kernel=kernel_of(form),
        show=tiled,
        score="s",
        slope="",
        masked="MASKED",
        keep_before="",
        clears_rows=clears,
        clears_ds=clears,
    )


def made(lines: list[str]) -> set[str]:
    return {line.strip().split(" = ")[0] for line in lines if " = " in line}


@pytest.mark.parametrize("form", get_args(Form))
def test_scores_become_p_and_ds(form: Form) -> None:
    text = form_of(form)
    assert "p" in made([*text.weights, *text.masking, *text.taken])
    assert "ds" in made(text.gradient)


@pytest.mark.parametrize("form", get_args(Form))
def test_what_may_be_anything_is_cleared_under_a_test_of_the_tile(form: Form) -> None:
    more = [line for line in form_of(form, clears=True).gradient if line not in form_of(form).gradient]
    assert more[0] == "if MASKED:"
    assert "0.0" in more[1]


def test_dv_takes_what_is_above_zero_of_softpick_alone() -> None:
    assert {form: made(form_of(form).picked) for form in get_args(Form)} == {
        "softmax": set(), "softpick": {"picked"}, "stick_breaking": set(), "none": set(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sums", "lines"),
    [
        ((True, True, False), "10 to 14, 16"),
        ((True, True, True), "10 to 16"),
        ((True, False, False), "10 to 12"),
        ((False, True, False), "10, 11, 13, 14, 16"),
    ],
)
def test_lines_of_the_paper_are_those_that_a_kernel_computes(
    sums: tuple[bool, bool, bool], lines: str
) -> None:
    """Line 10 is s, 11 p, 12 dv, 13 dp, 14 ds, 15 dq and 16 dk."""
    assert cite_lines(*sums) == f"FlashAttention-2, algorithm 2, lines {lines}"
