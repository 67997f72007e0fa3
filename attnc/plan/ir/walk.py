"""Everything that a part of a plan evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from attnc.expr.nodes import Expr
from attnc.source import Span


def expressions_within(part: object) -> Iterator[Expr]:
    """The expressions in a part of a plan, and in what it is made of."""
    if isinstance(part, Expr):
        yield part
        return
    match part:
        case Span() | None:
            pass
        case tuple() | list():
            for item in part:
                yield from expressions_within(item)
        case Mapping():
            yield from expressions_within(tuple(part.values()))
        case _ if is_dataclass(part):
            for field in fields(part):
                yield from expressions_within(getattr(part, field.name))
