"""The documentation as a site, by Sphinx: `make docs`. The pages are the Markdown files of this folder.

Sphinx and MyST are kept up, need no network, and turn a link that leads nowhere into a failure.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pygments.lexer import Lexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Text

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS))

from drawings import TILES, draw_bars, draw_legend, draw_tiles, pick_bars, read_table, tile_pictures  # noqa: E402

project = "attnc"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "attnc"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "github-dark"
exclude_patterns = ["_site"]
myst_heading_anchors = 6
smartquotes = False  # they would make one dash of the two in front of an option
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]

#: [text](path#anchor), but for addresses of other machines; text may hold brackets.
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


#: Where the first page of the site has the first screen of the README.
_FIRST_SCREEN = "<!-- the first screen of README.md -->"
_FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
#: A page's contents, a list of links to its own headings: the site has them beside the page.
_CONTENTS = re.compile(r"(?:^(?:\d+\.|-) \[[^\]]+\]\(#[^)]+\)\n){2,}\n?", re.MULTILINE)
_TERAFLOPS = "TFLOP/s on one NVIDIA H200"
#: The columns of tables that get bars above them, by the table's first columns: what the bars say, and the
#: series by the position of its column.
_BARS: Mapping[tuple[str, ...], tuple[str, Mapping[int, str]]] = {
    ("cell", "ms", "attnc", "cuDNN", "FA3", "FA4"): (
        _TERAFLOPS,
        {2: "attnc", 5: "FlashAttention-4", 4: "FlashAttention-3", 3: "cuDNN", 6: "attnc on Triton"},
    ),
    ("cell", "ms", "attnc", "cuDNN", "FA3"): (
        _TERAFLOPS,
        {2: "attnc", 4: "FlashAttention-3", 3: "cuDNN", 5: "attnc on Triton"},
    ),
    ("cell", "ms", "attnc", "cuDNN", "FA2", "Flex", "to cuDNN"): (
        _TERAFLOPS,
        {2: "attnc on Triton", 5: "FlexAttention", 4: "FlashAttention-2", 3: "cuDNN"},
    ),
    ("cell", "us", "attnc", "page 16"): (
        "GB/s of keys and values on one NVIDIA H200",
        {2: "attnc", 3: "attnc, pages of 16", 5: "cuDNN", 6: "FlashAttention-2", 7: "FlexAttention"},
    ),
    ("cell", "ms", "attnc", "cuDNN", "FA2", "Flex", "attnc on Triton"): (
        _TERAFLOPS,
        {2: "attnc on cuda.sm_80", 4: "FlashAttention-2", 5: "FlexAttention", 3: "cuDNN"},
    ),
    ("cell", "ms", "attnc", "FA2"): (_TERAFLOPS, {2: "attnc on cuda.sm_80", 3: "FlashAttention-2"}),
    ("", "kernels", "forward", "Triton", "Flex"): (
        "milliseconds of a forward on one NVIDIA H200, shorter is better",
        {2: "attnc", 3: "attnc on Triton", 4: "FlexAttention"},
    ),
    ("kernels", "attnc", "on Triton", "FlexAttention"): (
        "milliseconds on one NVIDIA H200, shorter is better",
        {1: "attnc", 2: "attnc on Triton", 3: "FlexAttention"},
    ),
}


def _adapted(app: Any, name: str, text: list[str]) -> None:
    """Makes a page of the site of a page of this folder: pictures for text, colours for code, links that lead
    somewhere.
    """
    page = text[0].replace(_FIRST_SCREEN, _first_screen())
    page = re.sub("`([·▒█])`", lambda tile: f'<i class="tile-chip tile-{TILES[tile[1]][0]}"></i>', page)
    page = _TABLE.sub(_draw_table, _FENCE.sub(_illustrate, _CONTENTS.sub("", page)))
    text[0] = _LINK.sub(lambda link: _kept(link, name), page)


def _illustrate(fence: re.Match[str]) -> str:
    """Draws tiles that stand in a block of text, and names the language of code."""
    language, body = fence.groups()
    if language not in ("", "text"):
        return fence[0]
    if pictures := tile_pictures(body):
        drawn = "".join(draw_tiles(*picture) for picture in pictures)
        shape = "tile-row" if len(pictures) > 1 else "tile-one"
        return _raw(f'<div class="{shape}">{drawn}</div>{draw_legend()}')
    if re.match(r"(attention|projection|schedule|def) ", body):
        return f"```attn\n{body}```"
    if "tl." in body or "for kv_lo in range" in body:
        return f"```python\n{body}```"
    return fence[0]


def _draw_table(found: re.Match[str]) -> str:
    """Draws bars above a table of speeds."""
    table = read_table(found[0].splitlines())
    for head, (unit, columns) in _BARS.items():
        if tuple(table[0][: len(head)]) == head and (groups := pick_bars(table, columns)):
            return f"\n{_raw(draw_bars(groups, unit))}\n\n{found[0]}"
    return found[0]


def _raw(html: str) -> str:
    return f"```{{raw}} html\n{html}\n```"


def _first_screen() -> str:
    """The README from below its title to the first heading, as a page of this folder has it: its first spec
    is followed by a picture of a mask and by the speeds of its table.
    """
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n", "", readme.split("\n", 1)[1].split("\n## ", 1)[0])
    text = text.replace("](docs/", "](").replace("](#speed)", "](performance.md)")
    spec = _FENCE.search(text)
    if spec is None:
        raise ValueError("README.md has no spec in front of its first heading")
    window = f"<div>{_picture_of_window(readme)}{draw_legend()}</div>"
    pictures = _raw(f'<div class="hero">{window}<div>{_speeds(readme)}</div></div>')
    return f"{text[: spec.end()]}\n\n{pictures}\n{text[spec.end() :]}"


def _picture_of_window(readme: str) -> str:
    for fence in _FENCE.finditer(readme):
        for title, rows, _ in tile_pictures(fence[2]) or ():
            if title == "sliding window":
                return draw_tiles("", rows, "A window's tiles: queries down, keys across")
    raise ValueError("README.md has no picture of a sliding window")


def _speeds(readme: str) -> str:
    for found in _TABLE.finditer(readme):
        table = read_table(found[0].splitlines())
        names = {_series(name): at for at, name in enumerate(table[0])}
        if "FlashAttention-3" in names:
            order = ("attnc", "FlashAttention-4", "FlashAttention-3", "cuDNN", "attnc on Triton")
            rows = [row for row in table[1:] if re.fullmatch(r"d\d+ h\d+ n4096 causal", row[0])]
            columns = {names[name]: name for name in order}
            groups = pick_bars([table[0], *(row for row in rows if "n/a" not in row)], columns)
            return draw_bars(groups, f"{_TERAFLOPS}, bf16, causal, 4096 keys")
    raise ValueError("README.md has no table of speeds beside FlashAttention-3")


def _series(head: str) -> str:
    """Returns the name in bars of a column of the README: `attnc, Triton` is attnc on Triton."""
    return "attnc on Triton" if head == "attnc, Triton" else head.split(",")[0]


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
