"""No input makes the front end fail in any other way than by telling its user what is wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark
from lark import Lark

from attnc.diagnostics import Diagnostic, DiagnosticError, render, to_json
from attnc.resources import resource
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.format import format_file
from attnc.syntax.parser import MAX_ERRORS, parse
from tests.profiles import is_night

EXAMPLES = [path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "examples").glob("*.attn")]

WORDS = (
    "attention schedule def param input output let length score mask normalize grad via is in for where "
    "and or not true false softmax causal q_pos kv_idx tile.q 64 0.5 1e9 1e999 ( ) [ ] { } , : . = == < + "
    "- * / // % #"
)
SLIPS = ("&", "|", "!", "**", "if", "?", "'", "@", ";", "\0", "\x1b", "\u2028", "é", "漢")
PIECES = st.sampled_from([*WORDS.split(), *SLIPS, " ", "\t", "\n", "\r\n"])


def draw_by_grammar() -> st.SearchStrategy[str]:
    """Draws what the grammar allows; not as tests are collected, since to read the grammar takes a second."""
    grammar = Lark(resource("grammar", "attn.lark").read_text(encoding="utf-8"), start="file", parser="lalr")
    return from_lark(grammar, alphabet=st.characters(codec="ascii"))


def check(text: str) -> None:
    """Either a tree that survives formatting, or diagnostics that can be shown."""
    file: ast.File | None = None
    errors: tuple[Diagnostic, ...] = ()
    try:
        file = parse(Source("fuzz.attn", text))
    except DiagnosticError as failure:
        errors = failure.diagnostics
    if file:
        formatted = format_file(file)
        again = parse(Source("formatted.attn", formatted))
        assert again == file
        assert format_file(again) == formatted
    assert len(errors) <= MAX_ERRORS
    for diagnostic in errors:
        assert 0 <= diagnostic.primary.span.start <= diagnostic.primary.span.end <= len(text)
    assert all(char.isprintable() or char == "\n" for char in render(errors))
    assert len(json.loads(to_json(errors))) == len(errors)


HOSTILE = {
    "brackets": "(" * 10_000,
    "closing brackets": "def a = 1" + ")" * 10_000,
    "nots": "def a = " + "not " * 10_000 + "b",
    "signs": "def a = " + "-" * 10_000 + "1",
    "sum": "def a = 1" + " + 1" * 10_000,
    "conjunction": "def a = 1" + " and 1" * 10_000,
    "comparison": "def a = 1" + " < 1" * 10_000,
    "deep sums": "def a = " + "(1+" * 60 + "1" + ")" * 60,
    "calls": "def a = " + "f(" * 62 + "1" + ")" * 62,
    "phases": "schedule a for t {" + "b {" * 70,
    "errors": "def\n" * 10_000,
    "comments": "#\n" * 10_000,
    "blank lines": "attention a {" + "\n" * 10_000 + "}",
    "long line": "def a = " + " " * 100_000 + "$",
    "digits": "def a = " + "9" * 100_000,
    "name": "def " + "a" * 100_000,
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts(name: str) -> None:
    check(HOSTILE[name])


# Generating sentences takes far longer than parsing them: fewer of the profile's by day.
@pytest.mark.slow
@settings(
    max_examples=max(settings().max_examples // (16 if is_night() else 32), 1),
    suppress_health_check=[HealthCheck.filter_too_much],
)
@given(st.deferred(draw_by_grammar))
def test_sentences_of_the_grammar(text: str) -> None:
    check(text)


@given(st.lists(PIECES | st.text(max_size=3), max_size=40), st.sampled_from(["", " "]))
def test_pieces(pieces: list[str], glue: str) -> None:
    check(glue.join(pieces))


@given(st.sampled_from(EXAMPLES), st.data())
def test_mutated_examples(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(PIECES | st.just("") | st.just(text[start:end] * 2)) + text[end:]
    check(text)


@given(st.text())
def test_any_text(text: str) -> None:
    check(text)
