"""Tape -> typed expressions of the language, with what is minus infinity moved from the score to the mask."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Expr,
    Index,
    Load,
    Neg,
    Not,
    Or,
    walk,
)
from attnc.flex.errors import refused
from attnc.flex.tape import Tape, operands

#: What attnc.model expands an expression to at most.
_MOST = 4096


class Expressions:
    """The expressions of a tape's entries.

    score: of the product that a score_mod is given; names: of captures; sizes: of their axes; scalars: names
    of the numbers, by position, that are arguments of the kernel.
    """

    def __init__(
        self,
        tape: Tape,
        score: Expr,
        names: Sequence[str],
        sizes: Sequence[Sequence[str]],
        scalars: Mapping[int, str],
    ) -> None:
        self._tape, self._score, self._names, self._sizes = tape, score, names, sizes
        self._scalars = scalars
        self._made: dict[int, Expr] = {}

    def of(self, at: int) -> Expr:
        """The expression of an entry. FlexError for one that is too large."""
        counts: list[int] = []
        for entry in self._tape.entries:
            counts.append(1 + sum(counts[operand] for operand in operands(entry)))
        if counts[at] > _MOST:
            raise refused("E0903", f"the mod is an expression of {counts[at]} operations", f"at most {_MOST}")
        for position in range(at + 1):
            self._made.setdefault(position, self._expression(position))
        return self._made[at]

    def _expression(self, at: int) -> Expr:
        entry = self._tape.entries[at]
        made = self._made
        match entry:
            case ("index", name):
                return Index(name)
            case ("score",):
                return self._score
            case ("integer", value):
                return Const(value)
            case ("constant", value):
                return Const(value if isinstance(value, bool) else float(value))
            case ("number", slot, type):
                if slot in self._scalars:
                    return Load(self._scalars[slot], (), (), type)
                return Const(self._tape.numbers[slot])
            case ("size", capture, axis):
                return Dim(self._sizes[capture][axis])
            case ("load", capture, indices):
                extents = tuple(map(Dim, self._sizes[capture]))
                loaded = tuple(made[index] for index in indices)
                return Load(self._names[capture], loaded, extents, self._tape.types[at])
            case ("real", operand):
                return made[operand]
            case ("neg", operand):
                found = made[operand]
                return Const(-found.value) if isinstance(found, Const) else Neg(found)
            case ("not", operand):
                return Not(made[operand])
            case ("and", left, right):
                return And((*_parts(And, made[left]), *_parts(And, made[right])))
            case ("or", left, right):
                return Or((*_parts(Or, made[left]), *_parts(Or, made[right])))
            case ("call", name, *arguments):
                return Call(name, tuple(made[argument] for argument in arguments))
            case (("==" | "!=" | "<" | "<=" | ">" | ">=") as symbol, left, right):
                return Compare(symbol, made[left], made[right])
            case (symbol, left, right):
                return Binary(symbol, made[left], made[right])
        raise AssertionError(f"no such entry: {entry}")


def _parts(kind: Any, expr: Expr) -> tuple[Expr, ...]:
    return expr.operands if isinstance(expr, kind) else (expr,)


def split(score: Expr) -> tuple[Expr, Expr]:
    """A score that is never minus infinity, and the condition under which it is that of a key that is kept.

    FlexError where minus infinity is computed with.
    """
    finite, kept = _split(score)
    return (Const(0.0) if finite is None else finite), kept


def _split(expr: Expr) -> tuple[Expr | None, Expr]:
    """The same; None for what is minus infinity everywhere."""
    if not any(_is_infinite(node) for node in walk(expr)):
        return expr, TRUE
    match expr:
        case Const(value=value) if value == -math.inf:
            return None, FALSE
        case Call(function="where", args=(condition, then, other)):
            first, first_kept = _split(then)
            second, second_kept = _split(other)
            if first is None:
                return second, _both(Not(condition), second_kept)
            if second is None:
                return first, _both(condition, first_kept)
            if first_kept == second_kept == TRUE:
                return Call("where", (condition, first, second)), TRUE
            either = Or((_both(condition, first_kept), _both(Not(condition), second_kept)))
            return Call("where", (condition, first, second)), either
        case Binary(op="+", left=left, right=right) | Call(function="min", args=(left, right)):
            first, first_kept = _split(left)
            second, second_kept = _split(right)
            if first is None or second is None:
                return None, FALSE
            whole = Binary("+", first, second) if isinstance(expr, Binary) else Call("min", (first, second))
            return whole, _both(first_kept, second_kept)
        case Binary(op="-", left=left, right=right) if not any(map(_is_infinite, walk(right))):
            first, kept = _split(left)
            return (None if first is None else Binary("-", first, right)), kept
        case Binary(op=("*" | "/") as op, left=left, right=Const(value=factor) as right) if factor > 0:
            first, kept = _split(left)
            return (None if first is None else Binary(op, first, right)), kept
        case Call(function="max", args=(left, right)):
            for one, other in ((left, right), (right, left)):
                if one == Const(-math.inf):
                    return _split(other)
    raise refused(
        "E0901",
        "an infinite value that is computed with",
        "only a score can be minus infinity",
        "use -inf as the score of a key that is to be left out: torch.where(condition, score, -inf)",
    )


def _is_infinite(expr: Expr) -> bool:
    return isinstance(expr, Const) and isinstance(expr.value, float) and not math.isfinite(expr.value)


def _both(first: Expr, second: Expr) -> Expr:
    if first == TRUE:
        return second
    if second == TRUE:
        return first
    return FALSE if FALSE in (first, second) else And((*_parts(And, first), *_parts(And, second)))


def conjunction(first: Expr, second: Expr) -> Expr:
    """first and second."""
    return _both(first, second)
