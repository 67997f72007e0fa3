"""How many heads a section has, as the texts of a module say for a call of a case (`support.sizes`).

Programs walk over the tiles of one section of heads after the other. In a call with one section, and where
all are as long as the first, nothing shows that is wrong about the others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from attnc.support.devices import Gpu, functions_of
from attnc.support.sizes import evaluate

#: The sizes that are sections, and what of heads is walked over by each of them.
_OVER = {"SECTION": "", "KV_SECTION": ", over keys"}
#: What follows from a number of heads: their text is its first argument.
_MADE_OF_HEADS = frozenset({"section", "joined_section", "min"})
#: A walk by its name: that of the forward, or that of a kernel of the backward, as configs call it.
Walk: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """Of one walk in one call: how many heads there are, and how many of them a section has."""

    heads: int
    section: int

    @property
    def ends_short(self) -> bool:
        """Whether two sections of several heads at least come before one that has fewer."""
        return 2 <= self.section < self.heads / 2 and self.heads % self.section != 0


def sections_of(
    call: Any, gpu: Gpu, sizes: Mapping[str, int], configs: Mapping[str, Any]
) -> Iterator[tuple[Walk, Sections]]:
    """Yields every walk of a call of these sizes. configs: by kernel; without those of the backward the
    forward's walks alone.
    """
    names: dict[str, Any] = {**sizes, **functions_of(gpu), "ROUND": 0}
    for name, text in call.sizes.items():
        names[name] = evaluate(text, names)
    for launch in call.launches:
        yield from _evaluated("forward", launch, {**names, "config": configs["forward"]})
    back = call.backward
    if back is None or not set(back.configs) <= configs.keys():
        return
    names |= {f"{kernel}_config": configs[kernel] for kernel in back.configs}
    for name, text in back.sizes.items():
        names[name] = evaluate(text, names)
    for launch in back.launches:
        kernel = getattr(launch, "config", "")
        own = {"config": configs[kernel]} if kernel else {}
        yield from _evaluated("backward", launch, {**names, **own})


def _evaluated(phase: str, launch: Any, names: dict[str, Any]) -> Iterator[tuple[Walk, Sections]]:
    if config := names.get("config"):
        names |= {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    texts = _texts(launch)
    for name, text in launch.sizes.items():
        names[name] = evaluate(text, names)
        if heads := texts.get(name):
            yield _walk(phase, launch, name), Sections(heads=evaluate(heads, names), section=names[name])


def _texts(launch: Any) -> dict[str, str]:
    """Returns the texts of the heads that sections are of, by the size of a section."""
    found = {}
    for name in (name for name in _OVER if name in launch.sizes):
        match ast.parse(launch.sizes[name], mode="eval").body:
            case ast.Call(func=ast.Name(id=function), args=[heads, *_]) if function in _MADE_OF_HEADS:
                found[name] = ast.unparse(heads)
    return found


def _walk(phase: str, launch: Any, name: str) -> Walk:
    kernel = getattr(launch, "config", "") or phase
    return f"{kernel}{_OVER[name]}"
