"""The defs that every spec may use: grammar/prelude.attn."""

from __future__ import annotations

from functools import cache

from attnc.resources import resource
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.parser import parse


@cache
def prelude() -> ast.File:
    """The tree of the prelude. Its source is named without the place of the installation."""
    return parse(Source("prelude.attn", resource("grammar", "prelude.attn").read_text(encoding="utf-8")))
