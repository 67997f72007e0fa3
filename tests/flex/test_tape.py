"""What the data of a captured tensor says of it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.flex.tape import _looked_at
from attnc.flex.trace import trace


@given(st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), max_size=3), st.booleans())
def test_data_is_sorted_by_rows_and_natural_where_it_is(rows: list[list[int]], is_flat: bool) -> None:
    x = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 3)
    if is_flat:
        x, rows = x.flatten(), [[value for row in rows for value in row]]
    is_sorted = all(row == sorted(row) for row in rows)
    assert tuple(_looked_at(x)) == (is_sorted, all(value >= 0 for row in rows for value in row))


def test_a_number_is_sorted() -> None:
    assert tuple(_looked_at(torch.tensor(3))) == (True, True)
    assert tuple(_looked_at(torch.tensor(-3))) == (True, False)


def test_a_tape_shows_what_it_holds() -> None:
    """As calls, down to some depth; names and numbers alone."""
    heat, table = torch.tensor(0.5), torch.ones(2, 4)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q > 3, score * heat, -torch.inf) + table[h, kv]

    traced = trace(mod, None, sizes={}, device=torch.device("cpu"))
    shown = "+(where(>(q_idx, 3), *(score, load), -inf), load(h, kv_idx))"
    assert traced.tape.show(traced.score) == shown
    assert traced.tape.show(traced.score, 0) == "+(..., ...)"
    assert not traced.tape.computes


def test_ties_are_looked_for_where_there_are_gradients() -> None:
    """Kernels without them, and masks, compute nothing more."""
    table, learned = torch.ones(4), torch.ones(4, requires_grad=True)

    def tied(traced: Any) -> bool:
        return any(entry[:2] == ("call", "where") for entry in traced.tape.entries)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.maximum(score, table[kv])

    def fixed(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + torch.maximum(table[q], table[kv])

    def bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + torch.minimum(learned[q], table[kv])

    for score_mod, gradients, ties in (
        (mod, True, True), (mod, False, False), (fixed, True, False), (bias, False, True),
    ):  # fmt: skip
        traced = trace(score_mod, None, sizes={}, device=torch.device("cpu"), gradients=gradients)
        assert tied(traced) == ties


def test_what_is_computed_from_data_is_noted() -> None:
    table = torch.ones(2, 4)
    mods: list[tuple[Any, bool]] = [
        (lambda score, b, h, q, kv: score + table[h, kv] * score.dim(), False),
        (lambda score, b, h, q, kv: score * table.shape[1] + table.dim() + table.size(0), False),
        (lambda score, b, h, q, kv: torch.add(input=score, other=table[h, kv]), False),
        (lambda score, b, h, q, kv: score + (table * 2)[h, kv], True),
        (lambda score, b, h, q, kv: score * float(table.sum()), True),
        (lambda score, b, h, q, kv: score + torch.ones(2)[h], True),
    ]
    for mod, computes in mods:
        assert trace(mod, None, sizes={}, device=torch.device("cpu")).tape.computes == computes
