"""Where templates come from and how they are read, the same for every target."""

from __future__ import annotations

import jinja2

from attnc.resources import resource


def template_environment(start: str = "{{", end: str = "}}") -> jinja2.Environment:
    """Templates by their path below templates/. start, end: what stands around a value.

    Nothing is escaped: the output is Python or C++, and only printers put text into it.
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
