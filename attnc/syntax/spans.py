"""Where nodes of a tree begin and end, found in half the time that Lark takes for lines and columns too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from lark import Lark, Tree
from lark.parse_tree_builder import PropagatePositions

_Build: TypeAlias = Callable[[list[Any]], Any]


def keep_spans_alone(lark: Lark) -> None:
    """Makes a parser note the offsets of its nodes, and neither lines nor columns, which nothing here reads.

    Lark has no option for that. A version that keeps its rules elsewhere goes on noting all of them.
    """
    with suppress(AttributeError):
        rules: dict[Any, Any] = lark.parser.parser.parser.callbacks
        for rule, build in rules.items():
            if type(build) is PropagatePositions and build.node_filter is None:
                rules[rule] = Spans(build.node_builder)


class Spans:
    """Builds a node, and notes its span: from the first of its children to the last, those included that it
    does not keep. A child that took the place of its own rule, as `x` does of `(x)`, keeps its span; what
    contains it begins and ends with the brackets.
    """

    __slots__ = ("build",)

    def __init__(self, build: _Build) -> None:
        self.build = build

    def __call__(self, children: list[Any]) -> Any:
        made = self.build(children)
        if type(made) is not Tree or (len(children) == 1 and made is children[0]):
            return made
        first, last = _find_span(children), _find_span(reversed(children))
        if first is None or last is None:
            return made
        meta: Any = made.meta
        meta.container_start_pos, meta.container_end_pos = first[0], last[1]
        if not hasattr(meta, "start_pos"):
            meta.start_pos = meta.container_start_pos
        if not hasattr(meta, "end_pos"):
            meta.end_pos = meta.container_end_pos
        meta.empty = False
        return made


def _find_span(children: Iterable[Any]) -> tuple[int, int] | None:
    """Returns where the first child that has a span begins and ends, None where none has."""
    for child in children:
        if type(child) is not Tree:
            return child.start_pos, child.end_pos
        meta: Any = child.meta
        if not meta.empty:
            return meta.container_start_pos, meta.container_end_pos
    return None
