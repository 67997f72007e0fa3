"""Integers at the ends of their types, on a GPU and over many tiles, both targets; in splits of pages too."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.kernels.extreme_integers import DECODE, KV_Q, MASKS, PAGED, choices, right_at, subject
from tests.targets import TARGETS, skip_without_launcher

TILES = "tile.q = 64, tile.kv = 64, warps = 4"
DECODE_TILES = "tile.q = 16, tile.kv = 64, warps = 1"
#: As long as the reference on the host allows, which takes most of the time.
CASE = Case(dims={"B": 2, "M": 300, "N": 500, "H": 2}, seed=4)


@pytest.fixture(autouse=True)
def launcher(target: str) -> None:
    skip_without_launcher(target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MASKS)
def test_rows(name: str, target: str) -> None:
    made = subject(name, "loops = [q, kv]", target, tiles=TILES)
    for values in choices(name):
        right_at(made, values, CASE)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["right", "window", "of a key"])
def test_keys_outside(name: str, target: str) -> None:
    made = subject(name, KV_Q, target, tiles=TILES)
    for values in choices(name):
        right_at(made, values, CASE)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["right", "window", "of 64 bits", "of a row", "of a key", "sorted"])
def test_gradients(name: str, target: str) -> None:
    made = subject(name, "loops = [q, kv]", target, "grad q, k, v", tiles=TILES)
    for values in choices(name):
        right_at(made, values, CASE)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["right", "window", "of 64 bits"])
@pytest.mark.parametrize("splits", ["3", "auto", "fixed(256)"])
def test_pages_in_splits(name: str, splits: str, target: str) -> None:
    """Where a bound wrapped around, a split began half a billion entries before the table."""
    schedule = DECODE.replace("split.kv = 3", f"split.kv = {splits}")
    made = subject(name, schedule, target, tensors=PAGED, tiles=DECODE_TILES)
    for values in choices(name):
        right_at(made, values, Case(dims={"B": 3, "M": 2, "N": 5000, "H": 2}, seed=3))


@pytest.mark.parametrize("target", TARGETS)
def test_queries_far_before_the_keys(target: str) -> None:
    """Shares of no key are empty, not of fewer: the first row of one would stand before the table."""
    made = subject("right", DECODE, target, tensors=PAGED, tiles=DECODE_TILES)
    right_at(made, {"right": 0}, Case(dims={"B": 1, "M": 3000, "N": 3, "H": 1}, seed=3))
