"""The documentation as a site, by Sphinx: `make docs`. The pages are the Markdown files of this folder.

Sphinx and MyST are kept up, need no network, and turn a link that leads nowhere into a failure.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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


def _adapted(app: Any, name: str, text: list[str]) -> None:
    """Links to files beside the documentation become their names, as the site has only these pages."""
    text[0] = _LINK.sub(lambda link: _kept(link, name), text[0])


def _kept(link: re.Match[str], name: str) -> str:
    target = (DOCS / link[2]).resolve()
    if not target.exists():
        raise FileNotFoundError(f"{name}: there is no file '{link[2]}'")
    return link[0] if target.is_relative_to(DOCS) else link[1]


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _adapted)
    return {"parallel_read_safe": True}
