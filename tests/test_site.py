"""The site of the documentation, which `make docs` builds: what would make that fail, without Sphinx."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_every_page_is_in_the_contents_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages)


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    """docs/conf.py, as Sphinx runs it."""
    spec = importlib.util.spec_from_file_location("conf_of_the_site", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_first_page_is_the_first_screen_of_the_readme(conf: ModuleType) -> None:
    text = [(DOCS / "index.md").read_text(encoding="utf-8")]
    conf._adapted(None, "index", text)
    spec, kernel, proof = "attention local_sink {", "for kv_lo in range(lo, hi, BLOCK_N):", "$ attnc verify"
    assert text[0].index(spec) < text[0].index(kernel) < text[0].index(proof)
    assert "pip install ." in text[0]
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text[0])
    assert len(links) >= 4
    assert all((DOCS / link).is_file() for link in links)


def test_specs_have_the_colours_of_editors(conf: ModuleType) -> None:
    """Nothing of a text is lost, and what the grammar colours is coloured."""
    text = "attention mine {  # two\n  score = dot(q, k)\n\n  mask = q_pos >= 4\n}\n"
    tokens = [(str(kind), part) for _, kind, part in conf.AttnLexer().get_tokens_unprocessed(text) if part]
    assert "".join(part for _, part in tokens) == text
    assert ("Token.Keyword", "attention") in tokens
    assert ("Token.Name.Function", "mine") in tokens
    assert ("Token.Comment", "# two") in tokens
    assert ("Token.Name.Builtin", "dot") in tokens
    assert ("Token.Literal.Number", "4") in tokens
    assert ("Token.Operator", ">=") in tokens
