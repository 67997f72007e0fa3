"""What forms of normalisation differ in, in CUDA kernels of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from attnc.model.attention import Form
from attnc.plan.ir.backward import BackwardKernel
from attnc.resources import resource
from attnc.target.sm80.backward_forms import BACKWARD_FORMS, CudaBackwardFormText, CudaSoftmaxBackwardText
from attnc.target.sm80.backward_step import Factors, MaskTest
from attnc.target.sm80.printer import CudaSums, at_row
from tests.plans import plans_of

TEMPLATES = resource("templates") / "cuda"


def kernel_of(form: Form) -> BackwardKernel:
    modules = plans_of("causal_gqa").modules
    module = next(module for module in modules if module.target == "cuda.sm_80")
    kernel = next(iter(module.backward_kernels.values()))
    return replace(kernel, softmax=replace(kernel.softmax, form=form))


def form_of(form: Form, partial: str, *, clears: bool = False) -> CudaBackwardFormText:
    kernel = kernel_of(form)
    mask = MaskTest(kernel, at_row, partial)
    mask.clears_ds = clears
    sums = CudaSums(adjoints=(), over_q=kernel.over_q, show=at_row, of_keys=(), dtypes={})
    return BACKWARD_FORMS[form](kernel=kernel, mask=mask, factors=Factors(kernel, sums), clears_rows=clears)


@pytest.mark.parametrize("form", get_args(Form))
def test_a_form_names_templates(form: Form) -> None:
    text = form_of(form, "true")
    assert (TEMPLATES / f"_backward_{text.step}.cu.jinja").exists()
    assert (TEMPLATES / f"_backward_element_{text.element}.cu.jinja").exists()


def test_p_is_constant_unless_the_mask_is_tested_where_it_is_made() -> None:
    assert {partial: form_of("softmax", partial).p_type for partial in ("true", "false", "q_lo < 7")} == {
        "true": "float",
        "false": "const float",
        "q_lo < 7": "const float",
    }


def test_ds_of_masked_keys_is_cleared_where_they_are_tested() -> None:
    for partial, clears in (("true", True), ("false", False)):
        text = form_of("softmax", partial, clears=True)
        assert isinstance(text, CudaSoftmaxBackwardText)
        assert text.clears_ds == clears
        assert text.ds_type == ("float" if clears else "const float")


def test_weights_are_kept_by_the_mask_and_inside_of_the_rows() -> None:
    text = form_of("none", "true", clears=True)
    assert text.if_kept("s") == f"keep && {text.mask.in_rows} ? s : 0.0f"
    assert form_of("none", "false").if_kept("s") == "s"
