"""What becomes of names of a spec that clash with those of a kernel."""

from __future__ import annotations

import pytest

from attnc.plan.names import (
    _words_of,
    cannot_be_passed,
    own_name,
)
from tests.plan.planning import resolved


def test_clashing_names() -> None:
    assert own_name("doc") == "doc"
    assert own_name("tile") == "tile_value"
    assert own_name("doc_ptr") == "doc_ptr_value"
    assert own_name("unsigned") == "unsigned_value"


@pytest.mark.parametrize(
    ("schedule", "grads", "refused"),
    [
        ("", "", set()),
        ("", "q", {"delta", "do", "dq", "dk", "backward_config"}),
        ("  loops = [kv, q]", "", {"acc", "l", "m"}),
        ("  loops = [kv]\n  split.kv = 4", "", {"splits", "lse_splits", "fallbacks"}),
    ],
)
def test_inputs_are_refused_where_they_clash(schedule: str, grads: str, refused: set[str]) -> None:
    names = {"delta", "do", "dq", "dk", "acc", "l", "m", "splits", "lse_splits", "fallbacks"}
    names |= {"backward_config"}
    variant, chosen = resolved(schedule=schedule, grads=grads)
    assert {name for name in names if cannot_be_passed(name, variant.attention, chosen)} == refused
    assert cannot_be_passed("next", variant.attention, chosen)
    assert not cannot_be_passed("half", variant.attention, chosen)


def test_words_that_templates_fill_in_are_read_too() -> None:
    text = 'int a = b.field;  // comment\n[[ ("const u32 made = taken(x);", "no") | lines ]] {% set y = 1 %}'
    assert {*_words_of(text)} == {"int", "a", "b", "const", "u32", "made", "taken", "x"}
