"""Spans of nodes are those that Lark finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lark import Lark, Tree
from lark.utils import TextSlice

from attnc.resources import resource
from attnc.syntax.parser import _lark
from attnc.syntax.spans import Spans

ROOT = Path(__file__).parents[2]
TEXTS = [
    *(
        path.read_text(encoding="utf-8")
        for path in sorted((Path(__file__).parent / "examples").glob("*.attn"))
    ),
    "def a = ((b))",
    "def a = (b + (c)) * ((d)) - -(e)",
    "def a(b, c) = f((b), (c + 1)) and not (b < c)",
    "",
]


@pytest.fixture(scope="module")
def plain() -> Lark:
    """The parser as Lark makes it."""
    ours = _lark()
    return Lark(
        resource("grammar", "attn.lark").read_text(encoding="utf-8"),
        start="file",
        parser="lalr",
        postlex=ours.options.postlex,
        propagate_positions=True,
        maybe_placeholders=False,
    )


def spans(tree: Tree[Any]) -> Iterator[tuple[str, int | None, int | None]]:
    nodes: Iterator[Tree[Any]] = tree.iter_subtrees_topdown()  # type: ignore[no-untyped-call]  # of Lark
    for node in nodes:
        yield str(node.data), getattr(node.meta, "start_pos", None), getattr(node.meta, "end_pos", None)


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_spans_are_those_of_lark(plain: Lark, number: int) -> None:
    text = TextSlice.cast_from(TEXTS[number])
    assert [*spans(_lark().parse(text))] == [*spans(plain.parse(text))]


def test_every_rule_notes_spans_alone() -> None:
    """Else Lark keeps its rules elsewhere now."""
    rules: dict[Any, Any] = vars(_lark())["parser"].parser.parser.callbacks
    assert rules
    assert {type(build) for build in rules.values()} == {Spans}
