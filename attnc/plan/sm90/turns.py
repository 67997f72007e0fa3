"""Turns of the blocks that add to dq on Hopper, kv tile after kv tile: under which masks they can be taken.

Blocks take the kv tiles of a head in the order of turns, and what a tile adds to a q tile follows what the
ones before it added, so no block waits for one that begins after it: of the tiles that are not done, the one
that began first waits for none, so there is no deadlock.

Where later kv tiles see later queries, as under a causal mask, they have turns from the last to the first,
each along its q tiles from the first to the last: a tile begins where no other has been, and comes to where
the one before began when that has gone on. Where all begin at the same q tile, turns are from the first kv
tile to the last, and walks from the last q tile to the first.

That takes that the kv tiles which see a q tile are neighbours. They are where `lo` and `hi`, the bounds of
the loop over queries, both grow with the keys, or `hi` falls, and no tile between them is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from attnc.expr.construct import ZERO
from attnc.expr.nodes import (
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Expr,
    Index,
    InList,
    Load,
    Or,
    Ref,
    Search,
    walk,
)
from attnc.plan.ir import Let, Regions
from attnc.plan.regions import guard_of, regions

#: How far tiles of keys walk over the queries of their sequence: over all of them; each not as far as the one
#: before it, to the last query; or, empty, not farther where the sequence is longer, for all that is known.
WalkLengths: TypeAlias = Literal["", "whole", "shrink"]
#: Of the tile of keys.
_TILE = (Index("kv_lo"), Index("kv_hi"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """why_not: why blocks cannot take turns, empty if they can; from_last: the last kv tile has the first
    turn, and walks go on to later queries; to_last: to the last query of their sequence; first_varies:
    the kv tile that is the first to add to a q tile is not the same for all, but where the one before it
    ends, or, from the last, begins.
    """

    why_not: str = ""
    from_last: bool = False
    to_last: bool = False
    first_varies: bool = False


@lru_cache(maxsize=64)
def turns_under(mask: Expr) -> Turns:
    """Returns the facts about turns under the mask of a normalised attention."""
    if any(isinstance(node, InList) for node in walk(mask)):
        return Turns(why_not="it lists blocks of keys, and skips those between")
    loops, _ = regions(mask, "q", None)
    if guard_of(loops) is not None:
        return Turns(why_not="it skips tiles between others")
    lo, hi = _bounds(loops)
    if not _grows(lo) or not (_grows(hi) or _falls(hi)):
        return Turns(why_not="keys that see a query are no neighbours, for all that is known")
    from_last = _grows(hi) and not _is_fixed(lo)
    first_varies = from_last or not _falls(hi)
    return Turns(from_last=from_last, to_last=from_last and _is_fixed(hi), first_varies=first_varies)


def lengths_of_walks(mask: Expr) -> WalkLengths:
    """Returns how far kv tiles walk over the queries of their sequence under a mask."""
    if any(isinstance(node, InList) for node in walk(mask)):
        return ""
    loops, _ = regions(mask, "q", None)
    lo, hi = _bounds(loops)
    if guard_of(loops) is not None or not _is_fixed(hi):
        return ""
    return "whole" if _is_fixed(lo) else "shrink" if _grows(lo) else ""


def _bounds(loops: Regions) -> tuple[Expr, Expr]:
    values = {let.name: let.value for let in loops.bounds if isinstance(let, Let)}
    ends = (loops.loops[0].start, loops.loops[-1].stop)
    lo, hi = (values.get(x.name, x) if isinstance(x, Ref) else x for x in ends)
    return lo, hi


def _is_fixed(expr: Expr) -> bool:
    return not any(node in _TILE for node in walk(expr))


def _grows(expr: Expr, *, from_zero: bool = False) -> bool:
    """Returns whether the value never falls from one kv tile to the next, for all that is known. from_zero:
    what is below 0 counts as 0.
    """
    if _is_fixed(expr) or expr in _TILE:
        return True
    match expr:
        case Binary(op="+", left=left, right=right):
            return _grows(left) and _grows(right)
        case Binary(op="-", left=left, right=right):
            return _grows(left) and _falls(right)
        case Binary(op="*" | "//", left=left, right=right):
            return _grows(left) and (isinstance(right, Dim) or (isinstance(right, Const) and right.value > 0))
        case Call(function="max", args=(one, other)):
            clamped = from_zero or ZERO in (one, other)
            return _grows(one, from_zero=clamped) and _grows(other, from_zero=clamped)
        case Call(function="min", args=(one, other)):
            return _grows(one) and _grows(other)
        case Call(function="where", args=(condition, one, other)):
            if _is_fixed(condition):
                return _grows(one, from_zero=from_zero) and _grows(other, from_zero=from_zero)
            return from_zero and one == ZERO and _ends(condition) and _grows(other, from_zero=True)
        case Search(prefix=prefix, value=value):
            return all(map(_is_fixed, prefix)) and _grows(value)
        case Load(is_sorted=True, indices=(*others, last)):
            return all(map(_is_fixed, others)) and _grows(last)
    return False


def _falls(expr: Expr) -> bool:
    if _is_fixed(expr):
        return True
    match expr:
        case Binary(op="+", left=left, right=right):
            return _falls(left) and _falls(right)
        case Binary(op="-", left=left, right=right):
            return _falls(left) and _grows(right)
        case Call(function="min" | "max", args=(one, other)):
            return _falls(one) and _falls(other)
        case Call(function="where", args=(condition, one, other)) if other == ZERO:
            return _is_fixed(one) and _ends(condition)  # sizes and positions, none below 0
    return False


def _ends(condition: Expr) -> bool:
    match condition:
        case _ if _is_fixed(condition):
            return True
        case Compare(op="<" | "<=", left=left, right=right):
            return _grows(left) and _falls(right)
        case Compare(op=">" | ">=", left=left, right=right):
            return _falls(left) and _grows(right)
        case And(operands=operands) | Or(operands=operands):
            return all(map(_ends, operands))
    return False
