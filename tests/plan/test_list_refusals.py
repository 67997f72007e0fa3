"""Why no kernel of a target walks over lists: the messages themselves are in tests/golden/diagnostics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnc.expr.nodes import Const, Dim, Expr, Index, Load
from attnc.plan.list_refusals import _is_limit, refuse_lists
from attnc.plan.targets import target_of
from tests.plan.planning import resolved


@pytest.mark.parametrize(
    ("mask", "target", "message"),
    [
        ("listed(idx, rows = 32, keys = 48)", "triton", ""),
        ("listed(idx, rows = 32, keys = 48)", "cuda.sm_80", ""),
        (
            "listed(idx, rows = 32, keys = 24)",
            "cuda.sm_80",
            "tiles of cuda.sm_80 have keys of one listed block",
        ),
        (
            "listed(idx, rows = 32, keys = 48) or causal",
            "triton",
            "a list that not every key has to be in is not lowered",
        ),
        ("listed(idx, rows = 24, keys = 48)", "triton", "blocks of 24 queries are not lowered"),
        (
            "listed(idx, rows = 32, keys = 48)",
            "cuda.sm_90a",
            "tiles of cuda.sm_90a have 64 queries or more, all with one list",
        ),
    ],
)
def test_the_first_refusal(mask: str, target: str, message: str) -> None:
    variant, schedule = resolved(mask, inputs=("idx: i32[B, H, R, S]",), target=target)
    found = [diagnostic.message for diagnostic in refuse_lists(variant, schedule, target_of(target))]
    assert found[:1] == ([message] if message else [])


@pytest.mark.parametrize(
    ("splits", "grads", "message"),
    [
        ("auto", "", ""),
        ("{2, auto}", "", ""),
        ("fixed(64)", "", "splits of lists have no fixed size"),
        ("auto", "q, k, v", "lists are not split beside gradients"),
    ],
)
def test_keys_of_a_list_are_split_into_a_number_of_parts(splits: str, grads: str, message: str) -> None:
    knobs = f"  loops = [kv], pack = gqa, tile.q = 16, split.kv {'in' if '{' in splits else '='} {splits}"
    mask, inputs = "listed(idx, rows = 1, keys = 48)", ("idx: i32[B, H, M, S]",)
    variant, schedule = resolved(mask, inputs=inputs, schedule=knobs, grads=grads)
    found = [diagnostic.message for diagnostic in refuse_lists(variant, schedule, target_of("triton"))]
    assert found == ([message] if message else [])


def test_a_count_is_a_number_of_the_call_or_of_each_list() -> None:
    lists = (Index("b"), Index("h"))
    condition: Any = SimpleNamespace(indices=lists)
    limits: list[Expr] = [Const(3), Dim("S")]
    limits += [Load("n", at, (), "int") for at in ((), lists, lists[:1], lists[::-1])]
    assert [_is_limit(limit, condition) for limit in limits] == [True, False, True, True, False, False]
