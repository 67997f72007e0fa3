"""What a step loads and computes, as text."""

from __future__ import annotations

from tests.target.texts import text_of


def test_loads_are_those_of_what_reads_them() -> None:
    step = text_of("document").step
    assert step.mask_fetches
    assert step.score_fetches == step.value_fetches == ()
    assert list(step.element_statements(step.mask_fetches)) == []  # the same for all rows of a thread
    assert len(list(step.key_statements(step.mask_fetches))) == len(step.mask_fetches)


def test_a_key_that_is_not_seen_has_no_score_or_no_weight() -> None:
    assert text_of("causal_gqa", "bf16_d128").step.excluded == "-INF"
    assert text_of("hstu").step.excluded == "0.0f"
    assert text_of("causal_gqa", "bf16_d128").step.v_scale == ""


def test_a_scale_is_a_factor_only_where_scores_have_one() -> None:
    assert text_of("causal_gqa", "bf16_d128").step.times_scale == " * SCALE"
    assert text_of("hstu").step.times_scale == ""
