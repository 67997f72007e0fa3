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
    spec, kernel, proof = (
        "```attn\nattention local_sink {",
        "for kv_lo in range(lo, hi, BLOCK_N):",
        "$ attnc verify",
    )
    mask, speed = '<rect class="tile-partial"', "FlashAttention-3: "
    places = [text[0].index(part) for part in (spec, mask, speed, kernel, proof)]
    assert places == sorted(places)
    assert "pip install ." in text[0]
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text[0])
    assert len(links) >= 4
    assert all((DOCS / link).is_file() for link in links)


def adapt(conf: ModuleType, text: str) -> str:
    page = [text]
    conf._adapted(None, "gallery", page)
    return page[0]


def test_contents_stand_in_the_sidebar_alone() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert index.count("```{toctree}") == index.count(":hidden:") > 0


def test_contents_of_a_page_stand_beside_it_alone(conf: ModuleType) -> None:
    page = "# A\n\n1. [B](#b)\n2. [`C`](#c)\n\n## B\n\n- [C](#c) says more.\n- [D](flex.md#d)\n"
    assert adapt(conf, page) == "# A\n\n## B\n\n- [C](#c) says more.\n- [D](flex.md#d)\n"


def test_options_keep_both_dashes(conf: ModuleType) -> None:
    """docs/cli.md has options in its sentences; Sphinx makes one long dash of two, unless told."""
    assert " --ranks " in (DOCS / "cli.md").read_text(encoding="utf-8")
    assert conf.smartquotes is False


def test_tiles_become_a_picture_in_three_tones(conf: ModuleType) -> None:
    page = adapt(conf, "```text\n▒▒··\n██▒▒\n```\n")
    assert '<rect class="tile-partial" x="0" y="0" width="2" height="2"/>' in page
    assert '<rect class="tile-skipped" x="2" y="0" width="2" height="2"/>' in page
    assert '<rect class="tile-full" x="0" y="2" width="2" height="2"/>' in page
    assert "▒" not in page
    for other in ("▒▒··\n██▒\nsee above, too\n", "nothing\n", "▒▒  ··\n██\n"):
        assert adapt(conf, f"```text\n{other}```\n") == f"```text\n{other}```\n"


def test_pictures_beside_each_other_keep_their_titles(conf: ModuleType) -> None:
    page = adapt(conf, "```text\nfull   causal mask\n██   ▒·\n1.0x   2.0x\n```\n")
    assert page.count("<svg") == 2
    assert page.index("full</figcaption>") < page.index("1.0x") < page.index("causal mask</figcaption>")


def test_code_is_coloured_by_what_it_is(conf: ModuleType) -> None:
    assert adapt(conf, "```text\nlo = tl.maximum(a, 0)\n```\n").startswith("```python\n")
    assert adapt(conf, "```\nattention a {\n}\n```\n").startswith("```attn\n")
    assert (
        adapt(conf, "```sh\nattention\n```\n```\ntl.x\n```\n")
        == "```sh\nattention\n```\n```python\ntl.x\n```\n"
    )


HEAD = "| cell | ms | attnc | FA2 | to FA2 |\n| --- | --- | --- | --- | --- |\n"


def test_speeds_become_bars_above_their_table(conf: ModuleType) -> None:
    rows = "| d64 n1024 full | 1.5 | 200 | 100 | 2x |\n| d64 n4096 full | 1.5 | 50 | n/a |  |\n"
    page = adapt(conf, HEAD + rows)
    assert page.endswith(HEAD + rows)
    assert "attnc on cuda.sm_80: 200 TFLOP/s" in page
    assert '--length: 1"' in page
    assert '--length: 0.5"' in page
    assert "n4096" not in page.removesuffix(HEAD + rows)  # nobody to stand beside
    assert adapt(conf, "| a | b |\n| --- | --- |\n| 1 | 2 |\n").count("<svg") == 0


def test_every_kind_of_bars_has_a_table(conf: ModuleType) -> None:
    """A table whose columns change must not lose its bars unseen."""
    heads = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for path in DOCS.glob("*.md")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    }
    for known in conf._BARS:
        assert any(head[: len(known)] == known for head in heads), known


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
