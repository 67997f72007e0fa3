"""What a kernel's text is made of: named values, loads, and loops over tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Literal, TypeAlias

from attnc.expr.nodes import Expr, Load
from attnc.source import Span

Axis: TypeAlias = Literal["q", "kv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Let:
    """`name = value`. `comment` says why, and `span` points at the spec line it follows from."""

    name: str
    value: Expr
    comment: str = ""
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A pointer into `tensor` at its leading indices, which are the same for the whole program.

    `doc_row = doc + b * stride`.
    """

    name: str
    tensor: str
    indices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """`name = tensor[indices]`, one element per point of `axes` (none: a scalar), 0 where `guard` is false.

    row: the pointer to start from, with its leading indices already applied; None: the tensor's first
    element.
    guard: only the conditions that the plan could not prove; TRUE means a plain load.
    """

    name: str
    load: Load
    axes: tuple[Axis, ...]
    guard: Expr
    row: Row | None = None


Statement: TypeAlias = Let | Row | Fetch


def fetch_expressions(fetches: Iterable[Fetch]) -> tuple[Expr, ...]:
    """The indices and guards of loads."""
    return tuple(expr for fetch in fetches for expr in (*fetch.load.indices, fetch.guard))


def statement_expressions(statement: Statement) -> tuple[Expr, ...]:
    """What a statement computes its value from."""
    match statement:
        case Let(value=value):
            return (value,)
        case Row(indices=indices):
            return indices
        case Fetch():
            return fetch_expressions((statement,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Tiles of one axis in a region: `for kv_lo in range(start, stop, BLOCK_N)`.

    masked: True, the tiles are *partial* and the step evaluates the mask; False, they are *full* and carry no
    mask code; an Expr over kv_lo (or q_lo) tells at run time, tile by tile.
    guard: a condition over the tile's kv_lo, kv_hi (or q_lo, q_hi) under which the tile has work; None:
    it always has. tests: values that the guard alone reads, of the tile at hand: made anew for every tile.
    zero_fill: tiles may hold keys without `Step.kept`, and the step makes their rows zero.
    """

    start: Expr
    stop: Expr
    masked: bool | Expr
    guard: Expr | None = None
    tests: tuple[Statement, ...] = ()
    zero_fill: bool = False

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """Everything that the loop computes."""
        masked = () if isinstance(self.masked, bool) else (self.masked,)
        guard = () if self.guard is None else (self.guard,)
        return (self.start, self.stop, *masked, *guard)

    def rewritten(self, rewrite: Callable[[Expr], Expr]) -> Loop:
        """The loop with every expression rewritten; it has no tests yet."""
        return replace(
            self,
            start=rewrite(self.start),
            stop=rewrite(self.stop),
            masked=self.masked if isinstance(self.masked, bool) else rewrite(self.masked),
            guard=None if self.guard is None else rewrite(self.guard),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The mask as control flow: `bounds` are scalars computed once per tile of the outer axis, `loops` run
    over `axis`.
    """

    axis: Axis
    bounds: tuple[Statement, ...]
    loops: tuple[Loop, ...]

    @property
    def tests(self) -> tuple[Statement, ...]:
        """What the guards of all loops read of the tile at hand."""
        return tuple({test.name: test for loop in self.loops for test in loop.tests}.values())

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All values that the control flow is made of."""
        return (*self.bounds, *self.tests)

    @property
    def are_short(self) -> bool:
        """Whether the mask ends the ranges on both sides (windows, documents), so that a loop tests its
        tiles.
        """
        return any(not isinstance(loop.masked, bool) for loop in self.loops)


def expressions_within(part: object) -> Iterator[Expr]:
    """The expressions in a part of a plan, and in what it is made of."""
    if isinstance(part, Expr):
        yield part
        return
    match part:
        case Span() | None:
            pass
        case tuple() | list():
            for item in part:
                yield from expressions_within(item)
        case Mapping():
            yield from expressions_within(tuple(part.values()))
        case _ if is_dataclass(part):
            for one in fields(part):
                yield from expressions_within(getattr(part, one.name))
