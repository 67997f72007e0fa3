"""The documentation as a site, by Sphinx: `make docs`. The pages are the Markdown files of this folder.

Sphinx and MyST are kept up, need no network, and turn a link that leads nowhere into a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments.lexer import Lexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Text

DOCS = Path(__file__).resolve().parent

project = "attnc"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "attnc"
exclude_patterns = ["_site"]
myst_heading_anchors = 4
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]

#: [text](path#anchor), but for addresses of other machines; text may hold brackets.
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


#: Where the first page of the site has the first screen of the README.
_FIRST_SCREEN = "<!-- the first screen of README.md -->"


def _adapted(app: Any, name: str, text: list[str]) -> None:
    """Links to files beside the documentation become their names, as the site has only these pages."""
    text[0] = _LINK.sub(lambda link: _kept(link, name), text[0].replace(_FIRST_SCREEN, _first_screen()))


def _first_screen() -> str:
    """The README from below its title to the first heading, as a page of this folder has it."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n", "", readme.split("\n", 1)[1].split("\n## ", 1)[0])
    return text.replace("](docs/", "](").replace("](#speed)", "](performance.md)")


def _kept(link: re.Match[str], name: str) -> str:
    target = (DOCS / link[2]).resolve()
    if not target.exists():
        raise FileNotFoundError(f"{name}: there is no file '{link[2]}'")
    return link[0] if target.is_relative_to(DOCS) else link[1]


class AttnLexer(Lexer):
    """Colours specs by the TextMate grammar that editors have: at each place the rule that matches first."""

    name = "attn"
    aliases = ("attn",)

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        start = 0
        for line in text.splitlines(keepends=True):
            at = 0
            for begin, end, scope in _coloured(line):
                yield start + at, Text, line[at:begin]
                yield start + begin, _TOKENS[scope], line[begin:end]
                at = end
            yield start + at, Text, line[at:]
            start += len(line)


_GRAMMAR = json.loads((DOCS.parent / "grammar" / "attn.tmLanguage.json").read_text(encoding="utf-8"))
#: By the first word of a scope.
_TOKENS = {
    "comment": Comment,
    "constant": Number,
    "entity": Name.Function,
    "keyword": Keyword,
    "operator": Operator,
    "storage": Keyword.Type,
    "support": Name.Builtin,
    "variable": Name.Variable,
}


def _rules(patterns: list[dict[str, Any]]) -> Iterator[tuple[re.Pattern[str], dict[str, str]]]:
    """(what it matches, scopes by group) of each rule, in order."""
    for pattern in patterns:
        if "include" in pattern:
            found = _GRAMMAR["repository"][pattern["include"].removeprefix("#")]
            yield from _rules(found.get("patterns", [found]))
        else:
            names = {group: part["name"] for group, part in pattern.get("captures", {}).items()}
            yield re.compile(pattern["match"]), names or {"0": pattern["name"]}


_RULES = list(_rules(_GRAMMAR["patterns"]))


def _coloured(line: str) -> Iterator[tuple[int, int, str]]:
    """(begin, end, key of _TOKENS) of the coloured parts of a line."""
    position = 0
    while found := min(
        (
            (match.start(), at)
            for at, (rule, _) in enumerate(_RULES)
            if (match := rule.search(line, position))
        ),
        default=None,
    ):
        rule, names = _RULES[found[1]]
        match = rule.search(line, position)
        assert match is not None
        for group, name in names.items():
            scope = "operator" if name == "keyword.operator.attn" else name.split(".")[0]
            yield *match.span(int(group)), scope
        position = max(match.end(), position + 1)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _adapted)
    app.add_lexer("attn", AttnLexer)
    return {"parallel_read_safe": True}
