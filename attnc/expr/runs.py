"""Runs of positions with symbolic ends, and the little set algebra that `solve` needs.

A run is [lo, hi) if its guard holds, else empty; ends are scalar expressions, None where unbounded. Positions
count from 0, so a `hi` of 0 empties a run and a `lo` of the length does too: that is how a guard is folded
into an end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.expr.arithmetic import ZERO, sub
from attnc.expr.facts import at_least, larger, relate, shift, smaller
from attnc.expr.logic import conj, disj, negate, where
from attnc.expr.nodes import FALSE, TRUE, Call, Expr, walk
from attnc.expr.simplify import nnf


@dataclass(frozen=True, slots=True)
class Run:
    """Positions lo .. hi - 1 where `guard` holds, else none; None: from 0, up to the length."""

    lo: Expr | None = None
    hi: Expr | None = None
    guard: Expr = TRUE

    @property
    def is_empty(self) -> bool:
        """Known to be empty for every tile."""
        if self.guard == FALSE:
            return True
        return self.hi is not None and at_least(self.lo or ZERO, self.hi)

    @property
    def is_all(self) -> bool:
        """Known to hold every position."""
        return self.lo is None and self.hi is None and self.guard == TRUE

    def guarded_lo(self, length: Expr) -> Expr | None:
        """lo, or the length where the guard fails."""
        return self.lo if self.guard == TRUE else where(self.guard, self.lo or ZERO, length)

    def guarded_hi(self, length: Expr) -> Expr | None:
        """hi, or 0 where the guard fails."""
        return self.hi if self.guard == TRUE else where(self.guard, self.hi or length, ZERO)

    def is_shorter_than(self, count: int) -> bool:
        """Whether fewer than `count` positions is proved for every tile."""
        if self.is_empty:
            return True
        if self.lo is None or self.hi is None:
            return False
        return at_least(shift(self.lo, count - 1), self.hi)


ALL = Run()
NONE = Run(guard=FALSE)


def intersect(a: Run, b: Run) -> Run:
    """Intersects two runs."""
    lo = a.lo if b.lo is None else b.lo if a.lo is None else larger(a.lo, b.lo)
    hi = a.hi if b.hi is None else b.hi if a.hi is None else smaller(a.hi, b.hi)
    return Run(lo, hi, conj(a.guard, b.guard))


def hull(a: Run, b: Run, length: Expr) -> tuple[Run, bool]:
    """The smallest run found that holds both, and whether it holds nothing else."""
    if a.is_empty or b.is_empty:
        return (b if a.is_empty else a), True
    if a.is_all or b.is_all:
        return ALL, True
    if a.guard == b.guard:
        lo = None if a.lo is None or b.lo is None else smaller(a.lo, b.lo)
        hi = None if a.hi is None or b.hi is None else larger(a.hi, b.hi)
        return Run(lo, hi, a.guard), a.lo == b.lo or a.hi == b.hi or _touch(a, b)
    either = disj(a.guard, b.guard)
    if a.hi == b.hi and a.lo == b.lo:
        return replace(a, guard=either), True
    lo, hi = _lower_start(a, b, length), _higher_end(a, b, length)
    if TRUE in (a.guard, b.guard) and _touch(
        a, b, given=either if either != TRUE else conj(a.guard, b.guard)
    ):
        return Run(lo, hi), True
    if a.hi == b.hi:
        return Run(lo, a.hi, either), True
    return Run(lo, hi), a.lo == b.lo


def _lower_start(a: Run, b: Run, length: Expr) -> Expr | None:
    """The lower start of the runs whose guards hold."""
    x, y = a.guarded_lo(length), b.guarded_lo(length)
    if x is None or y is None:
        return None
    if b.guard == TRUE:
        a, b, x, y = b, a, y, x
    least = smaller(x, b.lo) if b.lo is not None else ZERO
    if a.guard == TRUE and not (isinstance(least, Call) and least.function == "min"):
        return where(b.guard, least, x)
    return smaller(x, y)


def _higher_end(a: Run, b: Run, length: Expr) -> Expr | None:
    """The higher end of the runs whose guards hold."""
    x, y = a.guarded_hi(length), b.guarded_hi(length)
    if x is None or y is None:
        return None
    if b.guard == TRUE:
        a, b, x, y = b, a, y, x
    most = larger(x, b.hi) if b.hi is not None else length
    if a.guard == TRUE and not (isinstance(most, Call) and most.function == "max"):
        return where(b.guard, most, x)
    return larger(x, y)


def _touch(a: Run, b: Run, given: Expr = TRUE) -> bool:
    """Whether neither run starts behind the end of the other."""
    return all(x.hi is None or at_least(x.hi, y.lo or ZERO, given) for x, y in ((a, b), (b, a)))


def largest(a: Run, b: Run, length: Expr) -> Run:
    """A run inside the union: the union itself where it is one run, else the longer of the two.

    Which is longer is found at run time, unless that would take a page of code.
    """
    joined, is_union = hull(a, b, length)
    if is_union:
        return joined
    if _cost(a) + _cost(b) > 60:
        return b if a.guard != TRUE == b.guard else a
    is_longer = relate(">", _count(b, length), _count(a, length))
    takes_b = conj(b.guard, disj(nnf(negate(a.guard)), is_longer))
    lo = where(takes_b, b.lo or ZERO, a.lo or ZERO) if a.lo != b.lo else a.lo
    hi = where(takes_b, b.hi or length, a.hi or length) if a.hi != b.hi else a.hi
    return Run(lo, hi, disj(a.guard, b.guard))


def _count(run: Run, length: Expr) -> Expr:
    return sub(run.hi or length, run.lo or ZERO)


def _cost(run: Run) -> int:
    return sum(1 for part in (run.lo, run.hi, run.guard) if part is not None for _ in walk(part))
