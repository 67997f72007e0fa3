"""What a turn of queries takes, and what is declared of the kernels that take turns."""

from __future__ import annotations

import pytest

from attnc.support.sizes import evaluate
from attnc.target.triton import selected
from attnc.target.triton.render import text_of
from attnc.target.triton.selected import SelectedText, SumText
from tests.plan.test_selected import planned

SIZES = {"B": 2, "M": 100, "N": 500, "Hkv": 3, "H": 6, "S": 10}


def sum_text(keys: int = 1) -> SumText:
    module = planned(keys=keys)
    pairs = text_of(module, module.backward_kernels["dkdv"])
    assert isinstance(pairs, SelectedText)
    return SumText(module, pairs)


def turn_sizes(text: SumText) -> dict[str, int]:
    made = planned().lists
    assert made is not None
    names = dict(SIZES)
    for name, value in text.turn_sizes(made.extents[-1]).items():
        names[name] = evaluate(value, names)
    return {name: names[name] for name in ("list_places", "turn_queries", "turns")}


@pytest.mark.parametrize("queries", [1, 7, 99, 100, 1000])
def test_a_turn_has_no_more_memory_than_the_most(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """For each query, sequence and K/V head dk and dv of all places of a list, and a place for each key."""
    numbers = 2 * 3 * (10 * 128 + 500)
    monkeypatch.setattr(selected, "TURN_FLOATS", queries * numbers + numbers - 1)
    found = turn_sizes(sum_text())
    assert found["turn_queries"] == min(queries, 100)
    assert found["turns"] == -(-100 // found["turn_queries"])


def test_a_query_that_needs_more_has_a_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "TURN_FLOATS", 1)
    assert turn_sizes(sum_text()) == {"list_places": 10, "turn_queries": 1, "turns": 100}


@pytest.mark.parametrize(("keys", "places"), [(1, 10), (48, 480)])
def test_places_are_of_single_keys(keys: int, places: int) -> None:
    assert turn_sizes(sum_text(keys))["list_places"] == places


@pytest.mark.parametrize("empty", [{"N": 0}, {"S": 0}])
def test_there_is_memory_where_there_are_no_keys_or_entries(empty: dict[str, int]) -> None:
    """A tensor without elements is passed as None, which compilers take no address of."""
    text = sum_text()
    names = {**SIZES, **empty, "list_places": empty.get("S", 10), "turn_queries": 5, "turns": 1}
    for made in text.list_allocations():
        name, shape = made.values[0], str((made.fields or {})["type"])
        floats = evaluate(shape.strip('"').removeprefix("f32[").removesuffix("]"), names)
        assert floats > 0 or name == '"_sums"', "kernels ask whether there are sums of earlier turns"


def test_both_kernels_repeat_as_often() -> None:
    module = planned()
    texts = {name: text_of(module, kernel) for name, kernel in module.backward_kernels.items()}
    pairs = texts["dkdv"]
    assert isinstance(pairs, SelectedText)
    launches = (texts["dq"].parameters.launch, pairs.parameters.launch, SumText(module, pairs).launch)
    repeats = [(launch.fields or {}).get("repeats") for launch in launches]
    assert repeats == [None, '"turns"', '"turns"']
