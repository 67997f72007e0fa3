"""The site of the documentation, which `make docs` builds: what would make that fail, without Sphinx."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_every_page_is_in_the_contents_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages)
