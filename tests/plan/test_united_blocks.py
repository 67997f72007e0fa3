"""Queries whose heads fill a tile walk together over the blocks that any of them lists."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import show
from attnc.plan.ir import Decode, Module
from tests.refusals import refusal
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[QUERIES, HEADS, 64] STORAGE
  input k, v: bf16[B, N, 2, 64]
  input idx: i32[LISTS, S]
  EXTRAS
  score = dot(q, k) / 8
  mask = listed(idx, rows = 1, keys = KEYS) and causal
  normalize = softmax
  output o: bf16[QUERIES, HEADS, 64]
}

schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa, lists = union, SCHEDULE
}
"""
USUAL = {
    "QUERIES": "B, M",
    "HEADS": "32",
    "STORAGE": "",
    "LISTS": "B, 2, M",
    "EXTRAS": "",
    "KEYS": "64",
    "SCHEDULE": "stages = 2",
}
PACKED = {"QUERIES": "T", "STORAGE": "via ragged(cu)", "LISTS": "T, 2", "EXTRAS": "input cu: i32[B + 1]"}


def text(**changes: str) -> str:
    made = TEXT
    for word, value in {**USUAL, **changes}.items():
        made = made.replace(word, value)
    return made


def module(**changes: str) -> Module:
    (found,) = modules_of(text(**changes))
    return found


@pytest.mark.parametrize(("heads", "queries"), [("32", 4), ("16", 8), ("6", 8), ("64", 2)])
def test_as_many_queries_walk_together_as_fill_a_tile(heads: str, queries: int) -> None:
    made = module(HEADS=heads)
    assert made.lists is not None
    assert isinstance(made.kernel, Decode)
    assert made.kernel.pack is not None
    walks = [loop.listed for loop in made.kernel.regions.loops]
    assert all(walk is not None and (walk.memory, walk.queries) == ("list_bits", queries) for walk in walks)
    assert (made.lists.queries, made.lists.by_entry, made.listed_rows) == (queries, False, None)
    assert made.kernel.pack.padded == 64 // queries


@pytest.mark.parametrize(("keys", "tile"), [("128", 128), ("64", 64), ("32", 32), ("48", 16), ("16", 16)])
def test_a_tile_lies_in_one_block(keys: str, tile: int) -> None:
    assert {config.tile_kv for config in module(KEYS=keys).kernel.configs} == {tile}


def test_a_query_finds_its_list_by_its_place_or_its_row() -> None:
    alone, packed = module().lists, module(**PACKED).lists
    assert alone is not None
    assert packed is not None
    assert [show(place) for place in alone.places] == ["b", "h_kv", "query"]
    assert [show(place) for place in packed.places] == ["query_row", "h_kv"]
    assert show(alone.exists) == "h_kv < 2"
    assert show(packed.exists) == "query_row < T and h_kv < 2"


@pytest.mark.parametrize(("splits", "by_block"), [("3", True), ("auto", True), ("fixed(256)", False)])
def test_splits_have_as_many_listed_blocks_each_unless_their_keys_are_fixed(
    splits: str, by_block: bool
) -> None:
    kernel = module(SCHEDULE=f"split.kv = {splits}").kernel
    assert isinstance(kernel, Decode)
    assert kernel.split is not None
    assert (kernel.split.by_block, kernel.split.in_turn) == (by_block, False)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("tile.q = 128", "of blocks, in tiles of one warpgroup"),
        ("tile.kv = 48", "a block has 64 keys"),
        ("overlap = true, softmax = online(maximum = lazy(8))", "the decode kernel has no lazy maximum"),
    ],
)
def test_what_a_walk_together_has_not_is_refused(schedule: str, told: str) -> None:
    assert told in refusal(modules_of, text(SCHEDULE=schedule))


def test_a_length_of_queries_is_refused() -> None:
    shortened = "input m: i32[B]\n  length M = m[b]"
    assert "all queries of a tile have lists" in refusal(modules_of, text(EXTRAS=shortened))
