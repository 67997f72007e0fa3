"""Random masks: no tile is ever skipped or called full in error."""

from hypothesis import given, settings

from attnc.expr.nodes import Expr
from tests.expr.masks import Case, cases, masks
from tests.expr.soundness import check_classify, check_solve

EXAMPLES = 120


@settings(max_examples=EXAMPLES)
@given(mask=masks(), case=cases())
def test_classify_is_sound(mask: Expr, case: Case) -> None:
    check_classify(mask, case)


@settings(max_examples=EXAMPLES)
@given(mask=masks(), case=cases())
def test_solve_is_sound_for_kv(mask: Expr, case: Case) -> None:
    check_solve(mask, case, "kv_idx")


@settings(max_examples=EXAMPLES)
@given(mask=masks(), case=cases())
def test_solve_is_sound_for_q(mask: Expr, case: Case) -> None:
    check_solve(mask, case, "q_idx")
