"""Whole random specs, from text to result."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from attnc.verify.case import Case
from attnc.verify.strategies import cases
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import across
from tests.targets import TARGETS, needs_gxx
from tests.verify.judging import assert_within_bound, modules_of, subject_of_text
from tests.verify.random_lists import listed_rows_specs, listed_specs, united_specs
from tests.verify.random_specs import HOPPER, specs


def drawn(data: st.DataObject, made: Subject) -> Case:
    """A small case. Rows gigabytes apart have a test of their own, and take a second."""
    case = data.draw(cases(made.variant, replace(made.limits(), longest=50, work=16)))
    far = case.is_far
    return replace(case, layouts={}) if far else case


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2, suppress_health_check=list(HealthCheck))
@given(specs(), st.data())
def test_kernels_agree_with_the_reference(text: str, data: st.DataObject) -> None:
    note(text)
    made = subject_of_text(text)
    assert_within_bound(made, drawn(data, made))


@pytest.mark.slow
@settings(max_examples=max(settings().max_examples // 16, 2), suppress_health_check=list(HealthCheck))
@given(listed_specs(), st.data())
def test_listed_keys_agree_with_the_reference(text: str, data: st.DataObject) -> None:
    note(text)
    made = subject_of_text(text)
    assert_within_bound(made, drawn(data, made))


@pytest.mark.slow
@needs_gxx
@settings(max_examples=max(settings().max_examples // 24, 2), suppress_health_check=list(HealthCheck))
@given(listed_rows_specs(), st.data())
def test_listed_rows_agree_with_the_reference(text: str, data: st.DataObject) -> None:
    note(text)
    made = subject_of_text(text)
    assert_within_bound(made, drawn(data, made))


@pytest.mark.slow
@pytest.mark.nightly
@needs_gxx
@settings(max_examples=max(settings().max_examples // 24, 2), suppress_health_check=list(HealthCheck))
@given(united_specs(), st.data())
def test_unions_of_lists_agree_with_the_reference(text: str, data: st.DataObject) -> None:
    note(text)
    made = subject_of_text(text)
    assert_within_bound(made, drawn(data, made))


@pytest.mark.slow
@needs_gxx
@settings(max_examples=settings().max_examples // 12, suppress_health_check=list(HealthCheck))
@given(specs(targets=TARGETS).filter(lambda text: "for cuda" in text), st.data())
def test_targets_agree(text: str, data: st.DataObject) -> None:
    """Triton, CUDA and the reference, each within the bound of its plan, and the kernels with each other."""
    note(text)
    made = {module.target: subject_of(module) for module in modules_of(text)}
    triton, cuda = made["triton"], made["cuda.sm_80"]
    case = drawn(data, cuda)
    for subject_ in (triton, cuda):
        assert_within_bound(subject_, replace(case, config=case.config % len(subject_.configs)))
    assert not list(across({"triton": triton})(cuda, case))


@pytest.mark.one_in(2)
@pytest.mark.slow
@needs_gxx
@pytest.mark.parametrize("with_gradients", [True, False], ids=["gradients", "storages"])
@settings(max_examples=max(settings().max_examples // 50, 2), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_hopper_agrees_with_the_reference(with_gradients: bool, data: st.DataObject) -> None:
    """As tests.gpu.random_specs does on a GPU, thousands of times."""
    drawn_specs = specs(targets=(HOPPER,), widest=512, with_gradients=with_gradients)
    text = data.draw(drawn_specs.filter(lambda text: HOPPER in text))
    note(text)
    made = subject_of_text(text)
    assert_within_bound(made, drawn(data, made))
