"""Plans that are wrong are refused before they are printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.expr.nodes import Compare, Index
from attnc.plan import ir
from attnc.plan.verify import verify_module
from tests.plan.excluding import inputs
from tests.plan.planning import planned


def test_what_is_known_of_a_head_or_a_query_alone_is_refused() -> None:
    module = planned("kv_idx < end[b]", inputs=inputs("end["), grads="q, k, v")
    forward = module.kernel
    for name in ("h", "q_idx"):
        kept = Compare("<", Index("kv_idx"), Index(name))
        wrong = replace(forward, step=replace(forward.step, kept=kept))
        with pytest.raises(ValueError, match=f"'{name}' has no value here"):
            verify_module(replace(module, kernel=wrong))
    unmasked = replace(forward, step=replace(forward.step, keep=None))
    with pytest.raises(ValueError, match="no tile is masked"):
        verify_module(replace(module, kernel=unmasked))


def test_a_row_of_a_head_is_refused() -> None:
    """Rows of v are the same for all heads that share them, a pointer to a head's numbers is not."""
    made = planned("valid[b, kv_idx]", inputs=inputs("valid["))
    forward = made.kernel
    program = tuple(
        replace(item, indices=(Index("h"),)) if isinstance(item, ir.Row) else item for item in forward.program
    )
    with pytest.raises(ValueError, match="changes with the head"):
        verify_module(replace(made, kernel=replace(forward, program=program)))
