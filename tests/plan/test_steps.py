"""What the step of a tile asks of keys that no query of it sees."""

from __future__ import annotations

import re

import pytest

from attnc.expr.nodes import show
from tests.plan.excluding import kernel
from tests.plan.planning import planned

#: mask -> what copies of a tile have to ask of a key in front of the end of the loop.
INSIDE = {
    "kv_idx < end[b]": None,
    "kv_idx <= end[b] and kv_idx < 90": None,
    "causal and kv_idx < end[b]": None,
    "causal and kv_idx >= first[b] and kv_idx < end[b]": "kv_idx >= first",
    "kv_idx < first[b] or kv_idx >= end[b]": "kv_idx < first or kv_idx >= end",
    "(kv_idx < 4 or causal) and (kv_idx < end[b] or kv_idx < first[b])": None,
    "(causal and kv_idx < first[b]) or kv_idx < end[b]": "kv_idx < first or kv_idx < end",
    "sorted[kv_idx] < end[b]": "sorted < end",  # the search may end where the tensor does
    "valid[b, kv_idx]": "valid",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mask", "expected"), INSIDE.items())
def test_the_end_of_the_loop_is_asked_of_no_key(mask: str, expected: str | None) -> None:
    inside = kernel(mask, target="cuda.sm_80").step.kept_inside
    shown = None if inside is None else re.sub(r"_(value|kv)\b", "", show(inside))
    assert shown == expected


def test_a_mask_that_is_always_true_excludes_nothing() -> None:
    module = planned("kv_idx + 17 != -5", grads="q, k, v")
    assert module.backward is not None
    by_name = {item.kind: item.step.kept for item in module.backward.kernels}
    assert by_name["dkdv"] is None
