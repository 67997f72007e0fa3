"""Masks whose conditions exclude each other, and conditions of data for which no tile is skipped."""

from __future__ import annotations

import pytest
from hypothesis import given

from attnc.expr.nodes import Expr, show
from attnc.plan.mask_findings import contradicts, dense_conditions, name_all
from tests.expr.masks import Case, cases, masks
from tests.expr.spell import spell


@pytest.mark.parametrize(
    ("mask", "is_never"),
    [
        ("kv_idx <= q_idx and kv_idx > q_idx", True),
        ("kv_idx < q_pos and kv_idx == q_pos + 3", True),
        ("q_pos - 4 <= kv_idx <= q_pos - 5", True),
        ("kv_idx <= q_idx and not (kv_idx < q_idx + 1)", True),
        ("kv_idx == q_idx and kv_idx != q_idx", True),
        ("flag[b] and not flag[b]", True),
        ("keep[b, kv_idx] and kv_idx < 9 and (not keep[b, kv_idx] or kv_idx > 8)", False),
        ("(kv_idx < 4 and kv_idx > 3) or (kv_idx < q_idx and q_idx < kv_idx)", True),
        ("kv_idx * 2 < q_idx and kv_idx * 2 > q_idx - 1", True),
        ("doc[b, kv_idx] < 3 and doc[b, kv_idx] > 2", True),
        ("kv_idx < N - 5 and kv_idx >= N", True),
        ("kv_idx >= N + 2 or kv_idx < 0 - q_idx and q_pos > 3", False),
        ("kv_idx <= q_idx and kv_idx >= q_idx", False),
        ("q_pos - 4 <= kv_idx <= q_pos - 4", False),
        ("kv_idx <= q_idx and kv_idx > q_pos", False),
        ("kv_idx < prefix[b] and kv_idx > q_idx", False),
    ],
)
def test_pairs_that_exclude_each_other(mask: str, is_never: bool) -> None:
    assert contradicts(spell(mask)) == is_never


@given(masks(), cases())
def test_what_contradicts_itself_keeps_nothing(mask: Expr, case: Case) -> None:
    assert not (contradicts(mask) and case.kept(mask).any())


@pytest.mark.parametrize(
    ("mask", "dense"),
    [
        ("keep[b, kv_idx]", ["keep[b, kv_idx]"]),
        ("kv_idx <= q_idx and keep[b, kv_idx]", ["keep[b, kv_idx]"]),
        ("kv_idx <= q_idx and not keep[b, kv_idx]", ["not keep[b, kv_idx]"]),
        ("tag[b, kv_idx] == tag[b, q_idx]", ["tag[b, kv_idx] == tag[b, q_idx]"]),
        ("doc[b, kv_idx] == doc[b, q_idx]", []),
        ("kv_idx < 64 or keep[b, kv_idx]", ["kv_idx < 64 or keep[b, kv_idx]"]),
        ("kv_idx < N - 8 or keep[b, kv_idx]", []),
        ("kv_idx <= q_pos or keep[b, kv_idx]", ["kv_idx <= q_pos or keep[b, kv_idx]"]),
        ("kv_idx < prefix[b]", []),
        ("kv_idx <= q_idx and flag[b]", []),
        ("kv_idx <= q_idx", []),
        ("kv_idx < 128 and keep[b, kv_idx]", []),
        ("kv_idx < 129 and keep[b, kv_idx]", ["keep[b, kv_idx]"]),
    ],
)
def test_conditions_of_data_that_skip_nothing(mask: str, dense: list[str]) -> None:
    assert [show(condition) for condition in dense_conditions(spell(mask))] == dense


def test_schedules_are_named_by_target() -> None:
    names = [("triton", "decode"), ("cuda.sm_80", "decode"), ("triton", "prompt"), ("triton", "decode")]
    assert name_all(names) == "triton (decode, prompt) and cuda.sm_80 (decode)"
    assert name_all([("triton", "")]) == "triton"
