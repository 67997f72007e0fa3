"""The grammar as a document: unambiguous, and in step with what the code says about it."""

import json
import re
from collections.abc import Iterator

import pytest
from lark import Lark, Token
from lark.common import LexerConf
from lark.lexer import Lexer, LexerState

from attnc.model.names import CALLABLE
from attnc.resources import resource

GRAMMAR = resource("grammar", "attn.lark").read_text(encoding="utf-8")
KEYWORDS = set(re.findall(r'"([a-z]+)"', GRAMMAR))


class NoLexer(Lexer):
    """Stands in for the lexer, whose part of strict mode needs the optional package interegular."""

    def __init__(self, conf: LexerConf) -> None:
        self.conf = conf

    def lex(self, lexer_state: LexerState, parser_state: object) -> Iterator[Token]:
        yield from ()


def test_lalr_without_conflicts() -> None:
    Lark(GRAMMAR, start="file", parser="lalr", lexer=NoLexer, strict=True)


def test_terminals_do_not_collide() -> None:
    pytest.importorskip("interegular", reason="lark checks terminals for collisions with it")
    Lark(GRAMMAR, start="file", parser="lalr", strict=True)


def test_terminals_start_with_different_characters() -> None:
    """Enough for them not to collide, and what can be checked without interegular."""
    grammar = Lark(GRAMMAR, start="file", parser="lalr")
    patterns = [re.compile(t.pattern.to_regexp()) for t in grammar.terminals if t.pattern.type == "re"]
    for char in map(chr, range(128)):
        followed = (char, f"{char}0", f"{char}\n", f"{char}=")
        assert sum(any(pattern.match(text) for text in followed) for pattern in patterns) <= 1, char


def test_the_editor_grammar_knows_every_keyword() -> None:
    editor = json.loads(resource("grammar", "attn.tmLanguage.json").read_text(encoding="utf-8"))
    words = set(re.findall(r"[a-z_]+", json.dumps(editor["repository"])))
    assert words >= KEYWORDS


def test_the_editor_grammar_knows_every_function() -> None:
    editor = json.loads(resource("grammar", "attn.tmLanguage.json").read_text(encoding="utf-8"))
    functions = re.compile(editor["repository"]["function"]["match"])
    assert [name for name in (*CALLABLE, "dot", "softmax") if not functions.match(f"{name}(")] == []
    assert not functions.match("softcap(")
