"""Where templates come from and how they are read, the same for every target."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import jinja2

from attnc.resources import resource
from attnc.target.quote import quote


def template_environment(start: str = "{{", end: str = "}}") -> jinja2.Environment:
    """Templates by their path below templates/. start, end: what stands around a value.

    Nothing is escaped: the output is Python or C++. Code comes from printers alone, other text by way of
    `quote`.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        variable_start_string=start,
        variable_end_string=end,
        autoescape=False,
    )


@cache
def python_environment() -> jinja2.Environment:
    """Of templates of Python text."""
    environment = template_environment()
    environment.filters.update(quote=quote, quoted=_quoted)
    return environment


def _quoted(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
