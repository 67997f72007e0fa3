"""Where templates come from and how they are read, the same for every target."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import jinja2

from attnc.expr.nodes import Expr, Index
from attnc.plan.ir import Kernel
from attnc.resources import resource
from attnc.target.quote import quote
from attnc.target.triton.printer import load, scalar, score, statement, tiled


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
    environment.filters.update(
        load=load,
        scalar=scalar,
        tiled=tiled,
        score=score,
        statement=statement,
        times_scale=_times_scale,
        counter=_counter,
        quote=quote,
        quoted=_quoted,
    )
    return environment


def _times_scale(kernel: Kernel) -> str:
    return "" if kernel.softmax.scale is None else " * SCALE"


def _counter(number: Expr) -> str:
    """A word of 32 bits that random bits are drawn at."""
    return scalar(number) if isinstance(number, Index) else f"({scalar(number)}).to(tl.int32)"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
