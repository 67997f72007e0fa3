"""A bug is an anchored patch of a generated file.

Its anchor must occur exactly once in the code of the rendered module, or planting fails, so that a change of
a template cannot turn the test into an empty one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["forward", "backward"]
Target: TypeAlias = Literal["triton", "cuda.sm_80", "cuda.sm_90a", "projection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """anchor: code as a template prints it, whatever its line breaks; NUMBER stands for a literal; patch:
    what replaces it, or a function of that literal; phase: of a Python module, in whose kernels to look.

    file: of a CUDA module, the kernel of the backward ("backward_dkdv"), or "host" for the Python module; "":
    the forward kernel.
    """

    anchor: str
    patch: str | Callable[[float], str]
    phase: Phase = "forward"
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug(Place):
    """name; attention: of the specs, or the projection, in whose module it is planted; story: how kernels
    came by such a bug; also: further places that belong to it.
    """

    name: str
    attention: str
    story: str
    also: tuple[Place, ...] = ()
    target: Target

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is changed."""
        return (self, *self.also)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonBug(Bug):
    """In a Triton module: its kernels, or the functions that launch them."""

    target: Target = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBug(Bug):
    """In a kernel of a CUDA module, or in the Python beside it."""

    target: Target = "cuda.sm_80"


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperBug(Bug):
    """In a kernel of a CUDA module for Hopper."""

    target: Target = "cuda.sm_90a"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionBug(Bug):
    """In the module of a projection."""

    target: Target = "projection"


def plant(text: str, place: Place) -> str:
    """The module's text with the bug in it. ValueError unless the anchor occurs exactly once in its code."""
    tokens = [re.escape(token) for token in re.findall(r"\w+|\S", place.anchor)]
    # What stands before is looked at behind the first token, which `re` then searches for as plain text.
    tokens[0] += rf"(?<!\w{tokens[0]})"
    # A wrapped call has a comma before its closing bracket.
    spelled = r"\s*".join(rf",?\s*{token}" if token in (r"\)", r"\]") else token for token in tokens)
    pattern = spelled.replace("NUMBER", r"([-+.\de]+)") + r"(?!\w)"
    inside = [span for span, phases in _code_of(text) if place.phase in phases]
    found = [
        match
        for match in re.finditer(pattern, text)
        if any(first <= match.start() < last for first, last in inside)
    ]
    if len(found) != 1:
        raise ValueError(f"the anchor occurs {len(found)} times: {place.anchor!r}")
    (match,) = found
    patch = place.patch if isinstance(place.patch, str) else place.patch(float(match[1]))
    return text[: match.start()] + patch + text[match.end() :]


#: The first line of code, after a header that speaks of the code too.
_HEADER = re.compile(r"^(import torch|#ifndef BLOCK_M|#ifndef ATTNC_SHIM)$", re.M)
_BACKWARD = re.compile(r"^def \w*_(?:backward_\w*|columns|add_products)\b", re.M)


@lru_cache(maxsize=8)
def _code_of(text: str) -> tuple[tuple[tuple[int, int], tuple[Phase, ...]], ...]:
    """Returns the top-level pieces of a module behind its header, and the phases that each belongs to: what
    declares and launches kernels to both. ValueError for anything else.
    """
    start = _HEADER.search(text)
    if start is None:
        raise ValueError(f"this is not a module that attnc makes: {text[:40]!r}")
    ends = [match.end() for match in re.finditer(r"\n\n\n", text)]
    is_python = re.search(r"^import torch$", text, re.M) is not None
    found: list[tuple[tuple[int, int], tuple[Phase, ...]]] = []
    for first, last in pairwise([0, *ends, len(text)]):
        piece, span = text[first:last], (max(first, start.end()), last)
        if _BACKWARD.search(piece):
            found.append((span, ("backward",)))
        elif is_python and "@triton.jit" not in piece:
            found.append((span, ("forward", "backward")))
        else:
            found.append((span, ("forward",)))
    return tuple(found)
