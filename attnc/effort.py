"""What the compiler may spend on a file, counted in steps and not in seconds: a file that is refused is
refused on every machine, and one that is not takes no longer than a known number of steps.

Limits of size alone (characters, operations, variants, configs) multiply, and some analyses of masks take
more than linear time. So the primitives that all passes are made of count their work here. The work for a
file has pieces: an attention that is read, a variant that is planned for a target, its text. Any piece may
cost `MAX_STEPS`. All pieces of a file may cost `MAX_STEPS`, and `STEPS_PER_PIECE` for each after the first:
the cost of a file grows linearly with its output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

#: For any piece: a second of a core. A piece is read and planned in as many, and printed in as many again.
MAX_STEPS = 500_000
#: What each further piece adds to the steps of its file: a tenth of a second, several times what pieces cost.
STEPS_PER_PIECE = MAX_STEPS // 10
#: Set by `--no-limits`, also for the processes that a command starts.
_VARIABLE = "ATTNC_NO_LIMITS"
#: More than anything costs, and finite, so that differences are.
_ENDLESS = 1e300

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R")
#: Told that so many more pieces are to come (count, ""), and of each that is done (0, its name).
Watcher: TypeAlias = Callable[[int, str], None]


class Exhausted(Exception):
    """The steps of a piece, or of a file, are spent. `model.elaborate.report_limit` makes it a diagnostic."""


class _Unknown:
    """What no function gives."""


_UNKNOWN = _Unknown()


@dataclass(slots=True)
class _Meter:
    """most: steps of a piece; left: those not spent, of the piece at work if there is one, else of the file;
    granted: of the file since they were renewed; before: spent until then; known: what `memo` has seen, None
    outside of `limit_steps`; watcher: who is told of progress.
    """

    most: float = _ENDLESS
    left: float = _ENDLESS
    granted: float = _ENDLESS
    before: float = 0
    known: dict[Hashable, Any] | None = None
    watcher: Watcher | None = None


class _Thread(threading.local):
    """The meter of a thread, behind one look at what is the thread's own: steps are counted more often than
    anything else is done.
    """

    def __init__(self) -> None:
        self.meter = _Meter()


_THREAD = _Thread()


def spend(steps: float = 1) -> None:
    """Counts work: a step is about a visit of one node of an expression. Raises Exhausted."""
    meter = _THREAD.meter
    meter.left -= steps
    if meter.left < 0:
        raise Exhausted


@contextmanager
def limit_steps(steps: float = MAX_STEPS) -> Iterator[None]:
    """Limits the work of the block, which handles one file, to this many steps per piece. Inside another such
    block only that one's limit holds.
    """
    meter = _THREAD.meter
    if meter.known is not None:
        yield
        return
    meter.most = meter.left = meter.granted = at_most(steps)
    meter.before, meter.known = 0, {}
    try:
        yield
    finally:
        meter.most = meter.left = meter.granted = _ENDLESS
        meter.known = None


@contextmanager
def remember() -> Iterator[None]:
    """Lets `memo` remember within the block, which nothing limits that did not before."""
    with limit_steps(_ENDLESS):
        yield


@contextmanager
def limit_piece() -> Iterator[None]:
    """Limits the block, a piece of the file, on its own too. It may be a part of another piece."""
    meter = _THREAD.meter
    of_file = meter.left
    allowed = meter.left = min(of_file, meter.most)
    try:
        yield
    finally:
        meter.left = of_file - (allowed - meter.left)


def grant(pieces: int) -> None:
    """Adds what further pieces cost to the steps of the file."""
    meter = _THREAD.meter
    added = pieces * meter.most * STEPS_PER_PIECE / MAX_STEPS
    meter.left += added
    meter.granted += added


def announce(pieces: int) -> None:
    """Grants the file the steps of this many pieces; it has those of the first already."""
    grant(max(pieces - 1, 0))
    if (watcher := _THREAD.meter.watcher) is not None:
        watcher(pieces, "")


def finish(name: str) -> None:
    if (watcher := _THREAD.meter.watcher) is not None:
        watcher(0, name)


def renew() -> None:
    """Gives the file as many steps as it had in the beginning. A file whose schedules could be chosen is not
    refused for what that cost when it is planned, nor for the plans when they are printed.
    """
    meter = _THREAD.meter
    meter.before += meter.granted - meter.left
    meter.left = meter.granted = meter.most


def share_spent() -> float:
    """Returns what the file has cost so far, as a share of what its steps may be now: 0 without limits."""
    meter = _THREAD.meter
    return (meter.before + meter.granted - meter.left) / meter.granted


@contextmanager
def watch_pieces(watcher: Watcher) -> Iterator[None]:
    """Tells the watcher of the pieces that the block announces and finishes."""
    meter = _THREAD.meter
    before, meter.watcher = meter.watcher, watcher
    try:
        yield
    finally:
        meter.watcher = before


@contextmanager
def lift_limits() -> Iterator[None]:
    """Lifts every limit on the size of a file and the work for it."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def at_most(limit: float) -> float:
    """Returns the limit; what nothing reaches where limits are lifted."""
    return _ENDLESS if os.environ.get(_VARIABLE) else limit


def memo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Remembers what a pure function gave within a `limit_steps` block, and no longer: what a file costs does
    not depend on those before it.
    """

    @wraps(function)
    def recall(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        known = _THREAD.meter.known
        if known is None:
            return function(*args, **kwargs)
        spend()
        key = (function, args, tuple(kwargs.items())) if kwargs else (function, args)
        found: _R | _Unknown = known.get(key, _UNKNOWN)
        if isinstance(found, _Unknown):
            found = known[key] = function(*args, **kwargs)
        return found

    return recall


def memo_by_object(function: Callable[[_T], _R]) -> Callable[[_T], _R]:
    """Remembers, as `memo` does, what a pure function gave for an object, which need not have a hash: another
    one that is equal is computed anew.
    """

    @wraps(function)
    def recall(given: _T) -> _R:
        known = _THREAD.meter.known
        if known is None:
            return function(given)
        spend()
        key = (function, id(given))
        found: tuple[_T, _R] | _Unknown = known.get(key, _UNKNOWN)
        if isinstance(found, _Unknown):
            found = known[key] = (given, function(given))  # the object stays, and so does its id
        return found[1]

    return recall
