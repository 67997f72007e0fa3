"""Blocks that a mask of data keeps: where they are found, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from attnc.expr.nodes import show
from attnc.plan.ir.text import module_text
from tests.plan.planning import planned

SAME = "doc[b, q_pos] == doc[b, kv_idx]"
DOC = ("doc: i32[B, N]",)


def test_a_mask_that_looks_data_up_has_a_list_of_its_blocks() -> None:
    made = planned(f"causal and {SAME}", inputs=DOC, grads="q, k, v")
    assert made.lists is not None
    kept = made.lists.kept
    assert kept is not None
    assert (made.lists.rows, made.lists.keys, made.lists.inputs) == (128, 128, (("doc", 2),))
    assert [item.name for item in (*kept.of_queries, *kept.of_keys)] == ["doc", "doc_kv"]
    assert show(kept.hi) == "min(last_query + N - M + 1, N)"
    assert made.variant.attention.mask.span is not None
    text = module_text(made)
    assert "for kv_lo in blocks of 128 of lists[list_line: list_blocks + 1]" in text
    assert "kept blocks {" in text


@pytest.mark.parametrize(
    ("mask", "ends", "may"),
    [
        (
            SAME,
            ["most doc", "least doc_kv", "least doc", "most doc_kv"],
            "most_0 >= least_1 and least_2 <= most_3",
        ),
        (
            f"causal and ({SAME} or kv_idx < first[b])",
            [],
            "true",
        ),
        (
            "0 <= doc[b, q_pos] - doc[b, kv_idx] <= 7",
            ["most doc", "least doc_kv", "least doc - 7", "most doc_kv"],
            "most_0 >= least_1 and least_2 <= most_3",
        ),
        (
            "doc[b, q_pos] < doc[b, kv_idx] or doc[b, q_pos] > 2 * doc[b, kv_idx] + 3",
            ["least doc + 1", "most doc_kv", "most doc - 4", "least doc_kv * 2"],
            "least_0 <= most_1 or most_2 >= least_3",
        ),
        ("doc[b, q_pos] != doc[b, kv_idx]", [], "true"),
        ("doc[b, (q_idx + kv_idx) % N] == doc[b, kv_idx]", [], "true"),
    ],
)
def test_ends_exclude_blocks(mask: str, ends: list[str], may: str) -> None:
    """Nothing that is loaded is negated: 64 bits may not hold it."""
    made = planned(mask, inputs=("doc: i64[B, N]", "first: i32[B]"))
    assert made.lists is not None
    kept = made.lists.kept
    assert kept is not None
    found = [f"{'most' if end.is_most else 'least'} {show(end.value)}" for end in kept.ends]
    assert (found, show(kept.may)) == (ends, may)


def test_ranges_that_data_ends_are_those_of_all_keys() -> None:
    made = planned(f"kv_idx < end[b] and {SAME}", inputs=(*DOC, "end: i32[B]"))
    assert made.lists is not None
    assert made.lists.kept is not None
    assert (show(made.lists.kept.lo), show(made.lists.kept.hi)) == ("0", "N")


@pytest.mark.parametrize(
    ("mask", "inputs"),
    [
        ("causal", ()),
        (f"causal and {SAME}", ("doc: i32[B, N] is sorted",)),
        ("kv_idx < N - 64 or tree[b, q_idx, kv_idx]", ("tree: bool[B, M, N]",)),
        (f"listed(idx, rows = 64, keys = 64) and {SAME}", (*DOC, "idx: i32[B, R, S]")),
    ],
    ids=["positions", "a search", "all but a tile", "a list"],
)
def test_masks_of_other_kinds_have_none(mask: str, inputs: tuple[str, ...]) -> None:
    made = planned(mask, inputs=inputs)
    assert made.lists is None or made.lists.kept is None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"target": "cuda.sm_80"}, id="a target without lists"),
        pytest.param({"schedule": "  loops = [kv], split.kv = auto"}, id="decoding"),
        pytest.param({"schedule": "  loops = [kv, q]"}, id="keys outermost"),
        pytest.param(
            {"target": "cuda.sm_90a", "schedule": "  cluster = 2, consumers = 2"}, id="clusters walk together"
        ),
        pytest.param({"target": "cuda.sm_90a", "schedule": "  tile.kv = 48"}, id="tiles of 48 keys"),
        pytest.param(
            {
                "target": "cuda.sm_90a",
                "score": "dot(q, k) + w[h]",
                "inputs": (*DOC, "w: f32[H]"),
                "grads": "w",
            },
            id="gradients that no kernel over lists makes",
        ),
    ],
)
def test_where_no_list_can_be_walked_all_tiles_are_visited(changes: Mapping[str, Any]) -> None:
    assert planned(SAME, **{"inputs": DOC, **changes}).lists is None


def test_tiles_of_a_schedule_divide_blocks() -> None:
    made = planned(SAME, inputs=DOC, schedule="  tile.q = 256, tile.kv = 32, warps = 8")
    assert made.lists is not None
    assert (made.lists.rows, made.lists.keys) == (256, 128)
    made = planned(SAME, inputs=DOC, schedule="  consumers = 3", target="cuda.sm_90a")
    assert made.lists is not None
    assert (made.lists.rows, made.lists.keys) == (192, 128)


def test_dq_has_the_sum_that_lists_have() -> None:
    """Turns of a mask alone, two passes beside a list."""
    made = planned(f"causal and {SAME}", inputs=DOC, grads="q, k, v", target="cuda.sm_90a")
    assert [planned.kind for planned in made.backward_kernels.values()] == ["dq", "dkdv"]
