"""Printed sums, products and quotients have the value of what they are made of, and say nothing twice."""

from __future__ import annotations

from itertools import product

from attnc.target.terms import factor, minus, modulo, over, plus, times

NAMES = {"a": 7, "b": 3}
TERMS = ("a", "b", "0", "1", "2")


def test_what_changes_nothing_is_not_printed() -> None:
    assert (plus("ptr", "0"), plus("0", ""), plus("a", 0, "b")) == ("ptr", "0", "a + b")
    assert (minus("0", "BLOCK_N"), minus("lo", "BLOCK_N")) == ("-BLOCK_N", "lo - BLOCK_N")
    assert (times("B", 1, "N"), times(1, "1"), times("0", "stride")) == ("B * N", "1", "0")
    assert (over("chain", 1), over("chain", "Hkv"), over("row", "G", "/")) == (
        "chain",
        "chain // Hkv",
        "row / G",
    )
    assert (modulo("chain", "1"), modulo("chain", "Hkv")) == ("0", "chain % Hkv")


def test_a_factor_is_in_brackets_unless_it_is_a_name() -> None:
    assert [factor(text) for text in ("M", "args.M", "q_idx[r]", "64", "M + 1", "f(x)")] == [
        "M", "args.M", "q_idx[r]", "64", "(M + 1)", "(f(x))",
    ]  # fmt: skip


def test_values_are_those_of_the_operators() -> None:
    def value(text: str) -> int:
        return int(eval(text, {}, NAMES))

    for left, right in product(TERMS, repeat=2):
        assert value(plus(left, right)) == value(f"{left} + {right}")
        assert value(minus(left, right)) == value(f"{left} - {right}")
        assert value(times(left, right)) == value(f"{left} * {right}")
        if right != "0":
            assert value(over(left, right)) == value(f"{left} // {right}")
            assert value(modulo(left, right)) == value(f"{left} % {right}")
