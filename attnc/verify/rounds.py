"""Rounds in which a backward takes queries: as many at a time as there is room for what it keeps of them.

There is room for all queries of a small call, so that nothing would show what is wrong about the second
round. Calls that are verified have less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attnc.plan.lists import KEPT
from attnc.support.devices import Gpu, functions_of
from attnc.support.sizes import evaluate

#: What the boundary names as its axes; and numbers that calls which are verified keep at a time.
IN_ROUNDS, _FEW = "rounds of queries", 1 << 20
#: Sizes that rounds follow from.
_CHUNK, _ROUNDS = "chunk", "rounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRounds:
    """Of one call: its queries, and how many of them a round has."""

    queries: int
    chunk: int

    @property
    def end_short(self) -> bool:
        """Whether a round comes before one that has fewer queries."""
        return self.chunk < self.queries and self.queries % self.chunk != 0


def keep_less(module: ModuleType) -> None:
    """Lets calls of a module keep so few numbers that small cases take several rounds."""
    back = getattr(getattr(module, "CALL", None), "backward", None)
    if back is not None and _CHUNK in back.sizes:
        back.sizes[_CHUNK] = back.sizes[_CHUNK].replace(str(KEPT), str(_FEW))


def has_rounds(call: Any) -> bool:
    """Returns whether the backward of a call takes rounds; call: of a module, None where it is not known."""
    back = getattr(call, "backward", None)
    return back is not None and _ROUNDS in back.sizes


def rounds_of(
    call: Any, gpu: Gpu, sizes: Mapping[str, int], configs: Mapping[str, Any]
) -> Iterator[QueryRounds]:
    """Yields the rounds of a call of these sizes, if it takes any. configs: by kernel."""
    if not has_rounds(call):
        return
    names: dict[str, Any] = {**sizes, **functions_of(gpu)}
    names |= {f"{kernel}_config": config for kernel, config in configs.items()}
    for name, text in (*call.sizes.items(), *call.backward.sizes.items()):
        names[name] = evaluate(text, names)
    yield QueryRounds(queries=names["M"], chunk=names[_CHUNK])
