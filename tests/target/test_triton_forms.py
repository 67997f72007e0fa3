"""What forms of normalisation differ in, in forward kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from attnc.expr.nodes import Ref
from attnc.model.attention import Form
from attnc.plan.ir import Decode, Forward
from attnc.resources import resource
from attnc.target.triton.forms import FORMS, FormText, SoftmaxText
from tests.plans import plans_of


def form_of(form: Form, name: str = "causal_gqa", sink: Ref | None = None) -> FormText:
    kernel = next(module.kernel for module in plans_of(name).modules if module.target == "triton")
    assert isinstance(kernel, Forward | Decode)
    planned = replace(kernel, softmax=replace(kernel.softmax, form=form, sink=sink))
    return FORMS[form](planned, adds_in_order=False)


@pytest.mark.parametrize("form", get_args(Form))
def test_rows_start_with_all_that_a_step_hands_on(form: Form) -> None:
    text = form_of(form)
    lines = [line for line in text.start if not line.startswith("#")]
    assert sorted(line.split(" = ")[0] for line in lines) == text.carried
    assert (resource("templates") / f"triton/_step_{text.step}.py.jinja").exists()


@pytest.mark.parametrize("form", ["softmax", "softpick"])
def test_what_joins_the_denominator_joins_it_in_one_split(form: Form) -> None:
    sink = Ref("sink", "float") if form == "softmax" else None
    whole, split = form_of(form, sink=sink), form_of(form, "paged_decode", sink)
    assert "split" not in "\n".join(whole.start)
    assert "once" in split.start[0]
    assert "tl.where(split == 0, " in split.start[-1]


@pytest.mark.parametrize("form", ["softmax", "softpick"])
def test_rows_are_divided_once(form: Form) -> None:
    """By each step, or behind the last one."""
    text = form_of(form)
    assert isinstance(text, SoftmaxText)
    assert text.finished[-1].startswith("o = acc * (1.0 / ")
    softmax = replace(text.kernel.softmax, rescale="every_step")
    in_steps = FORMS[form](replace(text.kernel, softmax=softmax), adds_in_order=False)
    assert in_steps.finished == ["o = acc"]


def test_rows_yet_unseen_subtract_no_infinity() -> None:
    text = form_of("softmax")
    assert isinstance(text, SoftmaxText)
    assert [line.split(" = ")[0] for line in text.maximum] == ["m_new", "shift"]
    assert '== -float("inf")' in [*text.maximum][-1]
