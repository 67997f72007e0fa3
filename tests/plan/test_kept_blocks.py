"""Blocks that a mask of data keeps: where they are found, and what is told of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from types import CodeType
from typing import Any

import pytest

from attnc.expr.nodes import Expr, show
from attnc.plan.ir import Fetch
from attnc.plan.ir.list_making import KeptBlocks
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


@pytest.mark.one_in(2)
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
    assert (found[: len(ends)], show(kept.may)) == (ends, may)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mask", "sure", "full"),
    [
        (
            f"causal and {SAME}",
            "least_2 >= most_3 and most_0 <= least_1",
            "first_query + N - M >= last_key",
        ),
        (
            f"q_idx // 64 >= kv_idx // 64 and {SAME}",
            "least_2 >= most_3 and most_0 <= least_1",
            "least_4 >= most_5",
        ),
        (
            f"causal and ({SAME} or keep[b, kv_idx])",
            "least_0 >= most_1 and most_2 <= least_3 or least_4 >= 1",
            "",
        ),
        ("doc[b, (q_idx + kv_idx) % N] == doc[b, kv_idx]", "false", "false"),
        ("doc[b, q_pos] != doc[b, kv_idx]", "false", "false"),
    ],
)
def test_ends_tell_what_is_kept_as_a_whole(mask: str, sure: str, full: str) -> None:
    made = planned(mask, inputs=(*DOC, "keep: bool[B, N]"))
    assert made.lists is not None
    kept = made.lists.kept
    assert kept is not None
    assert show(kept.sure) == sure
    assert not full or show(kept.full) == full


MASKS = (
    f"causal and {SAME}",
    "0 <= doc[b, q_pos] - doc[b, kv_idx] <= 2 and kv_idx <= q_pos + 9",
    f"window(400, 200) and ({SAME} or kv_idx < first[b])",
    f"q_idx // 64 >= kv_idx // 64 and {SAME} and keep[b, kv_idx]",
    "doc[b, q_pos] + doc[b, kv_idx] > 4 or keep[b, kv_idx] and not keep[b, q_pos]",
    "causal or 40 * doc[b, q_pos] <= kv_idx < 90 * doc[b, q_pos]",
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mask", MASKS)
def test_what_ends_tell_is_true_of_every_pair(mask: str) -> None:
    made = planned(mask, inputs=(*DOC, "keep: bool[B, N]", "first: i32[B]"))
    assert made.lists is not None
    kept = made.lists.kept
    assert kept is not None
    told = 0
    for seed, (M, N) in enumerate([(256, 256), (200, 300), (300, 200), (256, 256), (130, 256), (256, 140)]):
        blocks = Blocks(kept, M, N, seed)
        for first_query, first_key in product(range(0, M, 128), range(0, N, 128)):
            may, sure, full, pairs = blocks.judge(first_query, first_key)
            assert may or not any(pairs)
            assert all(pairs) or not (sure and full)
            told += sure and full and all(pairs)
    assert told


class Blocks:
    """Drawn data of one sequence, and what the kernel that finds blocks computes of them."""

    def __init__(self, kept: KeptBlocks, M: int, N: int, seed: int) -> None:
        rng = random.Random(seed)
        run = rng.choice([100, 256, 300])
        values = [rng.randrange(5) for _ in range(9)]
        self.kept, self.M, self.N = kept, M, N
        self.data: Mapping[str, list[Any]] = {
            "doc": [values[at // run] for at in range(N)],
            "keep": [values[-1 - at // run] > 1 for at in range(N)],
            "first": [rng.choice([0, 140, 200])],
        }

    def judge(self, first_query: int, first_key: int) -> tuple[bool, bool, bool, list[bool]]:
        """Whether the block may have a pair that is kept, and what pairs are."""
        kept = self.kept
        queries = range(first_query, min(first_query + 128, self.M))
        keys = range(first_key, min(first_key + 128, self.N))
        known = {
            "first_query": queries[0],
            "last_query": queries[-1],
            "first_key": keys[0],
            "last_key": keys[-1],
        }
        fixed = self.values((), {**known, "M": self.M, "N": self.N, "b": 0})
        of_queries = [self.values(kept.of_queries, {**fixed, "query": at}) for at in queries]
        of_keys = [self.values(kept.of_keys, {**fixed, "kv_idx": at}) for at in keys]
        for end in kept.ends:
            found = [value_of(end.value, names) for names in (of_queries if end.axis == "q" else of_keys)]
            fixed[end.name] = max(found) if end.is_most else min(found)
        pairs = [value_of(kept.keep, {**q, **k}) for q in of_queries for k in of_keys]
        may, sure, full = (bool(value_of(x, fixed)) for x in (kept.may, kept.sure, kept.full))
        return may, sure, full, pairs

    def values(self, statements: Iterable[Any], names: dict[str, Any]) -> dict[str, Any]:
        """The names, and what is loaded besides."""
        for item in (*self.kept.program, *statements):
            if isinstance(item, Fetch):
                at = value_of(item.load.indices[-1], names)
                held = self.data[item.load.tensor]
                names[item.name] = held[at] if 0 <= at < len(held) else 0
        return names


def value_of(expr: Expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression: its text is Python's."""
    return eval(
        code_of(expr), {"where": lambda c, a, b: a if c else b, "true": True, "false": False}, dict(names)
    )


@cache
def code_of(expr: Expr) -> CodeType:
    return compile(show(expr), "expression", "eval")


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


@pytest.mark.one_in(2)
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
