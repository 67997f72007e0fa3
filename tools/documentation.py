"""The documentation as data: its blocks, its links, its command lines, and the texts between marks.

A page is Markdown. The word after a fence says what the block is, the words after that how it is checked:

    attn                 a whole spec, or statements of an attention: what they lack is filled in
    attn schedule        settings of a schedule
    attn planned         parses and resolves, but no target compiles it yet
    attn wrong           has mistakes; the `text` block that follows is what `attnc check` says
    python, attn         whose first line is a comment with a path: a file of the page's example
    python needs-NAME    the same, run where the package NAME is installed
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.parser import parse

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")) if path.exists())

#: What fragments of an attention are completed with, by the statement that must be there.
FILLING: Mapping[str, str] = {
    "input q": "input q: f16[B, M, Hkv * G, D]",
    "input k": "input k: f16[B, N, Hkv, D]",
    "input v": "input v: f16[B, N, Hkv, D]",
    "score": "score = dot(q, k) / sqrt(D)",
    "normalize": "normalize = softmax",
    "output o": "output o: f16[B, M, Hkv * G, D]",
}
_FENCE = re.compile(
    r"^(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=fence)\s*$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"# (?P<path>[\w./-]+\.(attn|py))")
_REGION = r"(?P<begin><!-- {name}:[^\n]*-->\n)(?P<text>.*?)(?P<end><!-- end of {name} -->)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: `line` is that of its fence, `marks` the words after its language."""

    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str
    #: Where the text starts on the page.
    start: int = 0

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_runnable(self) -> bool:
        """Whether the packages that it needs besides attnc's own are installed."""
        needed = (mark.removeprefix("needs-") for mark in self.marks if mark.startswith("needs-"))
        return all(importlib.util.find_spec(name) for name in needed)

    @property
    def file(self) -> str | None:
        """The path that the first line names, if it names one."""
        found = _FILE.fullmatch(self.text.split("\n", 1)[0])
        return found["path"] if found else None


def blocks(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *marks = match["info"].split() or [_guess(match["text"])]
        line = text.count("\n", 0, match.start()) + 1
        found.append(
            Block(
                page=page,
                line=line,
                language=language,
                marks=tuple(marks),
                text=match["text"],
                start=match.start("text"),
            )
        )
    return tuple(found)


def _guess(text: str) -> str:
    """The language of a block that does not say it: specs and command lines are checked all the same."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    return {"attention": "attn", "attnc": "sh", "$": "console"}.get(first, "")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def region(text: str, name: str) -> str:
    """What stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`; KeyError if nothing does."""
    match = re.search(_REGION.format(name=re.escape(name)), text, re.DOTALL)
    if match is None:
        raise KeyError(name)
    return match["text"]


def with_region(text: str, name: str, content: str) -> str:
    """The page with another text there."""
    old = region(text, name)
    return (
        re.sub(
            _REGION.format(name=re.escape(name)),
            lambda match: match["begin"] + content + match["end"],
            text,
            count=1,
            flags=re.DOTALL,
        )
        if old != content
        else text
    )


def cells(row: str) -> tuple[str, ...]:
    """The cells of a row of a table; `\\|` is a bar inside of one."""
    return tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1])


def anchors(page: Path) -> set[str]:
    """What links may point at in a page: its headings, as GitHub spells them."""
    names = re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", name).lower()).replace(" ", "-") for name in names}


def links(page: Path) -> Iterator[str]:
    """The targets of the page's links that are not addresses."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


def command_lines(page: Path) -> Iterator[str]:
    """Every `attnc ...` that the page shows: lines of shell blocks, and code in the text."""
    for block in blocks(page):
        if block.language in ("sh", "console", "bash", "yaml"):
            for line in block.text.replace("\\\n", " ").splitlines():
                found = re.match(r"\s*(?:- |run: |\$ )*(?:\.venv/bin/)?(attnc\b[^#|>]*)", line)
                if found:
                    yield found[1].strip()
    for code in re.findall(r"(?<!`)`(attnc [^`\n]+)`(?!`)", prose(page)):
        yield code.strip()


def whole(block: Block) -> str:
    """The block as a spec file: fragments are completed with what an attention needs."""
    if "schedule" in block.marks:
        body = block.text
        return f"{_attention('grad q, k, v')}\nschedule example for triton {{\n{body}}}\n"
    items = parse(Source(str(block), block.text)).items if _has_items(block.text) else ()
    if any(not isinstance(item, ast.Def) for item in items):
        return block.text
    if items:
        return f"{block.text}\n{_attention('')}"
    return _attention(block.text)


def _has_items(text: str) -> bool:
    return re.search(r"^(attention|schedule|def)\b", text, re.MULTILINE) is not None


def _attention(statements: str) -> str:
    """An attention with these statements, and with those that it needs besides."""
    missing = [text for start, text in FILLING.items() if not _declares(statements, start)]
    return "attention example {\n" + statements.rstrip() + "\n" + "\n".join(missing) + "\n}\n"


def _declares(statements: str, start: str) -> bool:
    word, _, name = start.partition(" ")
    if name:
        return re.search(rf"^\s*{word}\s[^:\n]*\b{name}\b[^:\n]*:", statements, re.MULTILINE) is not None
    return re.search(rf"^\s*{word}\s*=", statements, re.MULTILINE) is not None


def table(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)
