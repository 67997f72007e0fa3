"""What solving a mask for one index gives, and how the solutions of `and` and `or` come of those of their
operands: `and` intersects runs, `or` takes their hull.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.expr.facts import TILE
from attnc.expr.interval import classify
from attnc.expr.nodes import TRUE, Expr
from attnc.expr.runs import ALL, NONE, Run, hull, intersect, largest

Var: TypeAlias = Literal["q_idx", "kv_idx"]


@dataclass(frozen=True, slots=True)
class Solution:
    """Runs of positions that some element of the tile may keep, and that all keep; exact: the tile test adds
    nothing to `may`."""

    may: Run
    must: Run
    exact: bool = True


def conjunction(a: Solution, b: Solution) -> Solution:
    """The solution of `and`."""
    return Solution(intersect(a.may, b.may), intersect(a.must, b.must), a.exact and b.exact)


def disjunction(a: Solution, b: Solution, var: Var) -> Solution:
    """The solution of `or`; its runs may be too long (`may`) or too short (`must`), never the other way."""
    length = TILE[var][2]
    may, is_union = hull(a.may, b.may, length)
    has_all = any(x.exact and x.may.is_all for x in (a, b))
    exact = has_all or (is_union and a.exact and b.exact)
    return Solution(may, largest(a.must, b.must, length), exact)


def unsolved(mask: Expr) -> Solution:
    """All positions may be kept, unless the mask is false for the whole tile; none must be."""
    may, _ = classify(mask)
    return Solution(ALL, NONE, exact=may == TRUE)
