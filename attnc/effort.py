"""What one file may cost the compiler, counted in steps and not in seconds: a file that is refused is refused
on every machine, and one that is not takes no longer than a known number of steps.

Limits of size alone (characters, operations, variants, configs) multiply, and some analyses of masks take
more than linear time. So the primitives that all passes are made of count their work here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import inf
from typing import Any, ParamSpec, TypeVar

#: For reading and planning a file, which is what `attnc check` does, and as many again for what a command
#: then makes of the plans: about a second of a core each.
MAX_STEPS = 500_000

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Exhausted(Exception):
    """The steps that a file may cost are spent. `model.elaborate.report_limit` makes it a diagnostic."""


class _Unknown:
    """What no function gives."""


_UNKNOWN = _Unknown()


class _Meter(threading.local):
    """whole, left: steps of the block, and those not spent; known: what `memo` has seen, None outside of
    `limit_steps`.
    """

    whole: float = inf
    left: float = inf
    known: dict[Hashable, Any] | None = None


_METER = _Meter()


def spend(steps: float = 1) -> None:
    """Counts work: a step is about a visit of one node of an expression. Raises Exhausted."""
    _METER.left -= steps
    if _METER.left < 0:
        raise Exhausted


@contextmanager
def limit_steps(steps: float = MAX_STEPS) -> Iterator[None]:
    """Limits the work of the block. Inside another such block only that one's limit holds."""
    if _METER.known is not None:
        yield
        return
    _METER.whole, _METER.left, _METER.known = steps, steps, {}
    try:
        yield
    finally:
        _METER.whole, _METER.left, _METER.known = inf, inf, None


def renew() -> None:
    """Gives the block as many steps as it had in the beginning: the plans are there, and a file that `attnc
    check` accepts is not refused for what it cost to check.
    """
    _METER.left = _METER.whole


def memo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Remembers what a pure function gave within a `limit_steps` block, and no longer: what a file costs does
    not
    depend on those before it.
    """

    @wraps(function)
    def remembered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        known = _METER.known
        if known is None:
            return function(*args, **kwargs)
        spend()
        key = (function, args, tuple(kwargs.items())) if kwargs else (function, args)
        found: _R | _Unknown = known.get(key, _UNKNOWN)
        if isinstance(found, _Unknown):
            found = known[key] = function(*args, **kwargs)
        return found

    return remembered
