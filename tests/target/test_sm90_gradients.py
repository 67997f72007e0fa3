"""How dq, dk and dv leave, as text."""

from __future__ import annotations

from tests.plan.test_sm90_backward import planned
from tests.target.test_sm90_backward_tiles import texts_of


def test_padded_columns_are_not_stored() -> None:
    gradients = texts_of(planned(d=72, accumulate="two_pass"))["dkdv"].gradients
    assert gradients.multiplied("dk") == "D"
    assert gradients.columns("dk") == "72"
    assert gradients.sums("dk") == "(const float (&)[72 / 8][4])dk"


def test_whole_rows_are_stored_as_they_are_summed() -> None:
    gradients = texts_of(planned(accumulate="two_pass"))["dkdv"].gradients
    assert (gradients.columns("dk"), gradients.sums("dk")) == ("D", "dk")
    assert gradients.columns("dv") == "DV"


def test_dq_is_never_added_to_in_memory_as_it_leaves() -> None:
    assert not texts_of(planned(accumulate="two_pass"))["dq"].gradients.is_summed("dq")
