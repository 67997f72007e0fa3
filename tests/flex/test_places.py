"""Which operation of a mod an error of its spec is about."""

from __future__ import annotations

from attnc.flex.places import _closest


def test_the_closest_entry_is_the_least_around_else_the_largest_within() -> None:
    entries = {0: "x", 1: "a", 2: "f(a)", 3: "g(f(a), b)", 4: "b + c"}
    for wanted, expected in {
        "f(a)": 2,
        "(a)": 2,
        "a), b": 3,
        "a": 1,
        "": None,
        "b": 4,
        "h(f(a) + 1)": 2,
        "k(f(a), b + c)": 4,
        "z": None,
        "y(x)": None,  # one letter is in anything
    }.items():
        assert _closest(wanted, entries) == expected, wanted
