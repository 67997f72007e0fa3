"""Queries add to sums of single keys in turn: what each waits for. Programs run in their order here, so that
none ever has to wait; what they ask for is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from attnc.target.triton import selected
from tests.kernels.test_selected import subject

KEYS, TILE, QUERIES = 70, 16, 9
RANDOM = torch.Generator().manual_seed(1)
LISTS: Mapping[str, torch.Tensor] = {
    "some of all keys": torch.rand(QUERIES, KEYS, generator=RANDOM).argsort(-1)[:, :40],
    "all keys": torch.rand(QUERIES, KEYS, generator=RANDOM).argsort(-1),
    "no keys now and then": torch.stack(
        [torch.arange(20) if i % 2 else torch.full((20,), -1) for i in range(9)]
    ),
    "keys far apart": torch.stack([torch.arange(20) + i % 2 * 50 for i in range(QUERIES)]),
    "one key or all": torch.stack(
        [torch.arange(70) if i % 3 else torch.full((70,), 33) for i in range(QUERIES)]
    ),
    "keys twice": torch.arange(QUERIES * 40).reshape(QUERIES, 40) // 2 % KEYS,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "keys"), [*((name, 1) for name in LISTS), ("some of all keys", 3), ("no keys now and then", 3)]
)
def test_a_query_waits_for_all_before_it_that_have_its_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, keys: int
) -> None:
    """It asks for tiles of the query before alone, which have asked for others."""
    lists = torch.where(LISTS[name] * keys < KEYS, LISTS[name], -1).int()
    tiles = -(-lists.shape[1] * keys // TILE)
    asked = asked_for(monkeypatch, keys, lists, tiles)
    waited: dict[int, set[int]] = {}
    owners: dict[int, set[int]] = {}
    for query, row in enumerate(lists.tolist()):
        for tile, own in enumerate(keys_of_tiles(row, keys)):
            ticket = query * tiles + tile
            before = asked.get(ticket, set())
            waited[ticket] = before.union(*(waited[one] for one in before))
            others = {other for key in own for other in owners.get(key, set()) if other // tiles < query}
            assert others <= waited[ticket]
            for key in own:
                owners.setdefault(key, set()).add(ticket)


def test_a_tile_waits_for_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = LISTS["all keys"].int()
    asked = asked_for(monkeypatch, 1, lists, 5)
    assert asked == {ticket: {ticket - 5} if ticket >= 5 else set() for ticket in range(5 * QUERIES)}


def keys_of_tiles(row: list[int], keys: int) -> Iterator[set[int]]:
    """Keys of the tiles of a list, of which there is at least one."""
    named = [block * keys + key for block in sorted({*row} - {-1}) for key in range(keys)]
    for first in range(0, max(len(named), 1), TILE):
        yield {key for key in named[first : first + TILE] if key < KEYS}


def asked_for(
    monkeypatch: pytest.MonkeyPatch, keys: int, lists: torch.Tensor, tiles: int
) -> dict[int, set[int]]:
    """By ticket the tickets that it asks for, in gradients of queries with these lists."""
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(selected, "ENOUGH_TILES", 1)
    made = subject(MASK=f"listed(idx, rows = 1, keys = {keys})", LISTS="B, M", HEADS="G", KV="1")
    found: dict[int, set[int]] = {}
    wait = made.module._await_turn

    def recorded(turns: Any, first: Any, stop: Any) -> None:
        ticket = int(interpreter_builder.grid_idx[0])
        asked = range(*(int(number.handle.data.item()) for number in (first, stop)))
        found[ticket] = {(ticket // tiles - 1) * tiles + tile for tile in asked}
        wait(turns, first, stop)

    monkeypatch.setattr(made.module, "_await_turn", recorded)
    q = torch.randn(1, QUERIES, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, KEYS, 1, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    o, _ = made.module.a(q, k, v, lists[None])
    o.backward(torch.ones_like(o))
    return found
