"""The TextMate grammar: sound as a grammar, and colours what the language has, read as an editor reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from attnc.resources import resource

GRAMMAR = json.loads(resource("grammar", "attn.tmLanguage.json").read_text(encoding="utf-8"))


def rules(patterns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The matching rules of a list, in order, with what it includes in its place."""
    for pattern in patterns:
        if "include" in pattern:
            included = GRAMMAR["repository"][pattern["include"].removeprefix("#")]
            yield from rules(included.get("patterns", [included]))
        else:
            yield pattern


def scopes(line: str) -> list[tuple[str, str]]:
    """(text, scope) of a line's coloured parts: at each position the rule that matches first."""
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(line):
        tried = ((_search(rule, line, position), rule) for rule in rules(GRAMMAR["patterns"]))
        matches = [(match, rule) for match, rule in tried if match]
        if not matches:
            break
        match, rule = min(matches, key=lambda pair: pair[0].start())
        parts = {int(group): capture["name"] for group, capture in rule.get("captures", {}).items()}
        parts = parts or {0: rule["name"]}
        found += [(match[group], scope.removesuffix(".attn")) for group, scope in sorted(parts.items())]
        position = max(match.end(), position + 1)
    return found


def _search(rule: dict[str, Any], line: str, position: int) -> re.Match[str] | None:
    return re.compile(rule["match"]).search(line, position)


def test_every_rule_is_complete_and_used() -> None:
    used = {"comment", *(p["include"].removeprefix("#") for p in GRAMMAR["patterns"])}
    assert used == set(GRAMMAR["repository"])
    for rule in rules(GRAMMAR["patterns"]):
        groups = re.compile(rule["match"]).groups
        assert "name" in rule or set(map(int, rule["captures"])) == set(range(1, groups + 1))
        names = [rule["name"]] if "name" in rule else [c["name"] for c in rule["captures"].values()]
        for name in names:
            assert re.fullmatch(
                r"(comment|constant|entity|keyword|storage|support|variable)(\.[a-z-]+)*\.attn", name
            )


LINES: list[tuple[str, list[tuple[str, str]]]] = [
    ("attention mine {", [("attention", "keyword.declaration"), ("mine", "entity.name.function")]),
    (
        "  input q: bf16[B, M, 64]  # the mask is below",
        [
            ("  input", "keyword.other"),
            ("bf16", "storage.type"),
            ("64", "constant.numeric"),
            ("# the mask is below", "comment.line.number-sign"),
        ],
    ),
    (
        "  score = dot(q, k) / sqrt(D)",
        [
            ("  score", "keyword.other"),
            ("=", "keyword.operator"),
            ("dot", "support.function"),
            ("/", "keyword.operator"),
            ("sqrt", "support.function"),
        ],
    ),
    (
        "  mask = q_pos >= kv_idx and near(3)",
        [
            ("  mask", "keyword.other"),
            ("=", "keyword.operator"),
            ("q_pos", "variable.language"),
            (">=", "keyword.operator"),
            ("kv_idx", "variable.language"),
            ("and", "keyword.operator.word"),
            ("near", "entity.name.function"),
            ("3", "constant.numeric"),
        ],
    ),
    (
        "  input k: f16[B, N, D] via paged(table, page = 16)",
        [
            ("  input", "keyword.other"),
            ("f16", "storage.type"),
            ("via", "keyword.other"),
            ("paged", "entity.name.function"),
            ("=", "keyword.operator"),
            ("16", "constant.numeric"),
        ],
    ),
    ("  masked = 1", [("=", "keyword.operator"), ("1", "constant.numeric")]),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line.strip()[:20] for line, _ in LINES])
def test_lines_are_coloured(line: str, expected: list[tuple[str, str]]) -> None:
    assert scopes(line) == expected
