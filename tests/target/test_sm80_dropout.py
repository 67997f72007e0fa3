"""What is printed of dropout."""

from __future__ import annotations

from attnc.expr.nodes import Const, Index
from attnc.plan.ir.kernel import Dropout
from attnc.target.sm80.dropout import Drawing


def test_what_is_kept_is_scaled_unless_nothing_is() -> None:
    drawing = Drawing(Dropout(p=Const(0.25), seed=Const(7), head=Index("h")))
    assert drawing.scale == "(0.25f < 1.0f ? 1.0f / (1.0f - 0.25f) : 0.0f)"
    assert drawing.times_scale == f" * {drawing.scale}"
    assert drawing.drawn_by == "7, b, h"


def test_without_dropout_nothing_is_scaled() -> None:
    assert (Drawing(None).scale, Drawing(None).times_scale) == ("1.0f", "")
