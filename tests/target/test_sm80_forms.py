"""What forms of normalisation differ in, in CUDA kernels that compute o."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from attnc.expr.nodes import Ref
from attnc.model.attention import Form
from attnc.plan.ir import Decode, Forward
from attnc.resources import resource
from attnc.target.sm80.forms import FORMS, CudaFormText, CudaSoftmaxText
from attnc.target.sm80.thread import ThreadRows
from tests.plans import plans_of

TEMPLATES = resource("templates") / "cuda"


def form_of(form: Form, name: str = "causal_gqa", sink: Ref | None = None) -> CudaFormText:
    kernel = next(module.kernel for module in plans_of(name).modules if module.target == "cuda.sm_80")
    assert isinstance(kernel, Forward | Decode)
    kernel = replace(kernel, softmax=replace(kernel.softmax, form=form, sink=sink))
    thread = ThreadRows(
        kernel=kernel, dtypes={}, computed=(), split="q", row="8 * r + g", is_split=isinstance(kernel, Decode)
    )
    return FORMS[form](kernel=kernel, thread=thread, times_scale=" * SCALE", in_segments=False)


@pytest.mark.parametrize("form", get_args(Form))
def test_a_form_names_templates(form: Form) -> None:
    text = form_of(form)
    assert (TEMPLATES / f"_split_q_{text.update}.cu.jinja").exists()
    assert (TEMPLATES / f"{text.combine}.cu.jinja").exists()
    assert not text.weights or (TEMPLATES / f"_probabilities_{text.weights}.cu.jinja").exists()


@pytest.mark.parametrize("form", get_args(Form))
def test_rows_start_with_what_is_declared_of_them(form: Form) -> None:
    text = form_of(form)
    started = {line.partition("[")[0] for line in text.start if not line.startswith("//")}
    assert all(name in text.declared[0] for name in started)
    assert all(name in text.lse for name in started)


@pytest.mark.parametrize("form", ["softmax", "softpick"])
def test_what_joins_the_denominator_joins_it_in_one_split(form: Form) -> None:
    sink = Ref("sink", "float") if form == "softmax" else None
    whole, split = form_of(form, sink=sink), form_of(form, "paged_decode", sink)
    assert "split" not in "\n".join(whole.start)
    assert "split == 0 ? " in split.start[-1]


def test_rows_yet_unseen_subtract_no_infinity() -> None:
    softmax, softpick = form_of("softmax"), form_of("softpick")
    assert isinstance(softmax, CudaSoftmaxText)
    assert isinstance(softpick, CudaSoftmaxText)
    assert [line.split(" = ")[0] for line in softmax.maximum] == ["const float m_new", "const float shift"]
    assert "== -INF" in softmax.maximum[-1]
    assert "INF" not in softpick.maximum[-1]
