"""Kinds of GPU functions and what they are made of: named values, loads and loops over tiles, what a program
owns, the step of one tile, splits of the keys, and what a kernel promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, cast

from attnc.expr.nodes import Binary, Const, Dim, Expr, Index, Load, Node, Ref
from attnc.model.attention import Form
from attnc.model.schedule import ForwardConfig, TileConfig
from attnc.plan.access import Rows, Section, Sequences, TileWalk
from attnc.plan.ir.bound import ErrorBound
from attnc.plan.ir.lists import ListWalk
from attnc.plan.layout import Layout, Roles, SharedBytes
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
    """Returns the indices and guards of loads."""
    return tuple(expr for fetch in fetches for expr in (*fetch.load.indices, fetch.guard))


def statement_expressions(statement: Statement) -> tuple[Expr, ...]:
    """Returns what a statement computes its value from."""
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
    listed: tiles are those of listed blocks, and not those between start and stop.
    """

    start: Expr
    stop: Expr
    masked: bool | Expr
    guard: Expr | None = None
    tests: tuple[Statement, ...] = ()
    zero_fill: bool = False
    listed: ListWalk | None = None

    @property
    def expressions(self) -> tuple[Expr, ...]:
        masked = () if isinstance(self.masked, bool) else (self.masked,)
        guard = () if self.guard is None else (self.guard,)
        listed = () if self.listed is None else (self.listed.line, self.listed.stride)
        return (self.start, self.stop, *masked, *guard, *listed)

    def rewrite(self, rewrite: Callable[[Expr], Expr]) -> Loop:
        """Returns the loop with every expression rewritten; it has no tests yet."""
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
        return tuple({test.name: test for loop in self.loops for test in loop.tests}.values())

    @property
    def statements(self) -> tuple[Statement, ...]:
        return (*self.bounds, *self.tests)

    @property
    def are_short(self) -> bool:
        """Whether the mask ends the ranges on both sides (windows, documents), so that a loop tests tiles."""
        ends = (loop for loop in self.loops if loop.listed is None or not loop.listed.knows_full)
        return any(not isinstance(loop.masked, bool) for loop in ends)


def expressions_within(part: object) -> Iterator[Expr]:
    """Yields the expressions in a part of a plan, and in what it is made of."""
    match part:
        case None | str() | int() | Span():
            pass
        case Node():
            yield cast(Expr, part)
        case tuple() | list():
            for item in part:
                yield from expressions_within(item)
        case Mapping():
            yield from expressions_within(tuple(part.values()))
        case _:  # `fields` would make a tuple of them each time
            for name in getattr(part, "__dataclass_fields__", ()):
                yield from expressions_within(getattr(part, name))


#: How much faster a multiprocessor reads while others idle, and where rows lie in pages; measured on an H200.
IDLE_GAIN, PAGED_IDLE_GAIN = 1.3, 1.2
#: What a byte of a partial result costs, which is written and read again, in bytes of keys; measured there.
PARTIAL_TRIPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The query heads of a KV head fill the rows of a tile: row = q_idx * group + h - h_kv * group. alone: a
    tile has heads of one query, and rows behind them that are none; padded: or so many rows of each query.
    """

    group: Expr
    alone: bool
    padded: int = 0

    @property
    def rows(self) -> Expr:
        if self.padded or not self.alone:
            return Const(self.padded) if self.padded else self.group
        tile = Dim("BLOCK_M")
        tiles = Binary("//", Binary("+", self.group, Binary("-", tile, Const(1))), tile)
        return Binary("*", tiles, tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Flash-Decoding: programs share the keys lo .. hi - 1 that a row tile visits, whole tiles each.

    The bounds are found on the device, so the number of programs, which is all that a launch fixes, does not
    depend on any length. A split may be empty.

    in_turn: a split that is counted, and not of a fixed size, has every SPLITS-th tile, so that its first
    tile is known before any length is; else its tiles follow each other. by_block: it has as many blocks that
    a list names as the others, and what lies between them. max_visible_keys: the most keys that one row
    visits, where the mask limits them to a window; None: all. staged: bytes of shared memory that a block of
    each config takes where tensor cores read tiles there, 0 if no more than elsewhere (`Target.staged`);
    staging: major capabilities of such devices, none if no config takes more.

    Into how many splits keys are cut follows from a model of time (`support.splits.plan_splits`): idle_gain
    is how much faster a multiprocessor reads while others idle, most the splits that are considered, trips
    what a byte of a partial result costs in bytes of keys. few: where a call has fewer tiles of keys for each
    multiprocessor, blocks share the columns of o; 0: never. block_share: of what a multiprocessor can read,
    what a block does alone, if it does more with keys than multiply them. short: tiles of keys that a block
    walks over, up to which it takes the config of the fewest stages.
    segment: keys of a split under `order = absolute(...)`, which begins at a multiple of them; its sums are
    not divided, and joined in order (0: splits may be of any size).
    """

    lo: Expr
    hi: Expr
    in_turn: bool
    by_block: bool
    max_visible_keys: int | None
    staged: tuple[int, ...]
    staging: tuple[int, ...]
    idle_gain: float
    most: int
    trips: int
    few: int
    block_share: float = 1.0
    short: int = 0
    segment: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The keys lo .. hi - 1 of a tile of rows, in segments of `size` keys from multiples of that on. The sums
    of each start from nothing, and are joined with those of the ones before.
    """

    size: int
    lo: Expr
    hi: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class DotPart:
    """Columns first .. first + width - 1 of q and k: dot(q, k) is the sum over parts.

    A head dimension far from a power of two would otherwise fill tiles with zeros.
    """

    first: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedMax:
    """FlashDecoding++: every row subtracts `phi` in place of its maximum.

    low, high: where the row's largest exponent s - phi may lie; fallback: it may lie elsewhere, and the split
    is then computed again with a running maximum. All in base-2 units.
    """

    phi: float
    low: float
    high: float
    fallback: bool


M = Dim("M")
Structure: TypeAlias = Literal[
    "forward_q_kv",
    "forward_kv_q",
    "decode",
    "backward_dq",
    "backward_dq_kept",
    "backward_dkdv",
    "selected_dq",
    "selected_dkdv",
    "selected_turns",
    "selected_tokens",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Drop with probability `p`.

    The keep-mask is Philox-4x32-7 of `seed` at (kv_idx // 16, q_idx, head, b), 15 bits for each of 16 keys.
    """

    p: Expr
    seed: Expr
    head: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Probabilities:
    """How a step makes probabilities of scores: p = exp2(scale * s - m), then dropout.

    scale: factor of the raw score in the exponent: set when score = scale * s with scale > 0, so that the
    multiplication fuses with the subtraction; None where it is in base-2 units. form: of "none" p = s.
    """

    scale: float | None
    dropout: Dropout | None
    form: Form

    @property
    def normalises(self) -> bool:
        return self.form in ("softmax", "softpick")

    @property
    def has_statistics(self) -> bool:
        """Whether rows have more than a sum: a maximum and a denominator, or what is left of a stick."""
        return self.form != "none"

    @property
    def breaks_sticks(self) -> bool:
        return self.form == "stick_breaking"

    @property
    def rectifies(self) -> bool:
        return self.form == "softpick"


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax(Probabilities):
    """How the rows are normalised.

    kind: "online" keeps a running maximum; "two_pass" finds m and l first and recomputes the scores.
    rescale (online): "deferred" divides once at the end (FlashAttention-2); "every_step" keeps o normalised
    (FlashAttention-1); "lazy" rescales only when the maximum has grown by more than `threshold` (in base-2
    units).
    headroom: 0, the maximum is looked for in every tile; else only until every row has one, and what
    exponents subtract lies so far (in base-2 units) above it that p says when it has grown by more.
    safe_everywhere: a full tile may consist of -inf scores too, so every step guards the subtraction of
    maxima.
    sink: base-2 logit that joins the denominator. v_scale: factor of the rows of o; one that differs from
    key to key is the step's.
    """

    kind: Literal["online", "two_pass"]
    rescale: Literal["deferred", "every_step", "lazy"]
    threshold: float
    safe_everywhere: bool
    sink: Expr | None
    headroom: float = 0.0
    v_scale: Expr | None = None

    @property
    def expressions(self) -> tuple[Expr, ...]:
        return tuple(expr for expr in (self.sink, self.v_scale) if expr is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What o is: `value`, over the attention (Attended, the text `o`), of each row and column.

    program: pointers, and what it loads once; rows, fetches: what it loads of each row, and of each column
    (axis "kv" here) or of both. All of it is read at the end, where the loop over keys holds no registers.
    """

    value: Expr
    program: tuple[Statement, ...]
    rows: tuple[Fetch, ...]
    fetches: tuple[Fetch, ...]
    span: Span | None

    @property
    def statements(self) -> tuple[Statement, ...]:
        return (*self.program, *self.rows, *self.fetches)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        read = (expr for item in self.statements for expr in statement_expressions(item))
        return (*read, self.value)


#: The key and the column of an element of a tile of k or v, whose rows are keys.
KEY_ROW = Ref("key_row", "int", ("q",), natural=True, within=(0, 2**30))
TILE_COLUMN = Ref("column", "int", ("kv",), natural=True, within=(0, 2**30))


#: What `ColumnScale` calls columns behind those of k: their values are what it has for them.
REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnScale:
    """What the elements of a tile of k or v are multiplied by, once it has the type of q: in float32, and
    rounded to that type again.

    tensor: "k", "v" or REST; fetches: what it loads, of the element in row KEY_ROW and column TILE_COLUMN,
    whose axes are called "q" and "kv" here; value: over these.
    """

    tensor: str
    fetches: tuple[Fetch, ...]
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBits:
    """Bits of words that the mask reads of each row and key: those of a tile of keys are moved next to each
    other. fetch: a word; place: the number of a key's bit in its row; word: that of its word; bit: what the
    mask reads.
    """

    fetch: Fetch
    place: Expr
    word: Expr
    bit: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens to one q tile x kv tile.

    fetches: loads made in every step; masked_fetches: those that only a partial tile needs;
    score: Expr of Dot (the text `s`), None when the raw dot product is used as it is;
    keep: the mask of a partial tile, the key sequence's end included; None when no tile is partial;
    kept: over kv_idx, what every key fulfils that some query of the sequence keeps (see `plan.regions`); of
    others not even a NaN may count, so that their rows of v, and of k in the backward, are made zero; None
    where the mask implies nothing of the kind; kept_inside: what of it keys before the end of the last loop
    may still lack, and all of it where loops run over queries;
    v_scale: what rows of v are multiplied by, where that differs from key to key: p is, before it is rounded;
    scales: of columns of k and v; bits: what masked loads have of all keys of a tile;
    uses_kv_idx: a full tile needs the key positions too; names: values of the enclosing function that the
    step takes, in order.
    """

    fetches: tuple[Fetch, ...]
    masked_fetches: tuple[Fetch, ...]
    score: Expr | None
    keep: Expr | None
    uses_kv_idx: bool
    names: tuple[str, ...]
    kept: Expr | None = None
    kept_inside: Expr | None = None
    v_scale: Expr | None = None
    scales: tuple[ColumnScale, ...] = ()
    bits: tuple[KeyBits, ...] = ()
    score_span: Span | None = field(default=None, compare=False, repr=False)
    keep_span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which program does what.

    over: "q" (a program per q tile, head and batch), "kv" (a program per kv tile, KV head and batch) or
    "head" (a program per head and batch)
    persistent: one program per SM walks over the tiles
    longest_first: tiles of the last rows come first, since under a causal mask they have the most work
    sequences: how tiles of ragged queries are numbered, None where all have M rows
    section: which heads' tiles are walked together, None where one head comes after the other
    """

    over: Literal["q", "kv", "head"]
    persistent: bool
    longest_first: bool
    sequences: Sequences | None
    section: Section | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileKernel(ABC):
    """One GPU function over tiles of queries and keys: what `Forward`, `Decode` and `BackwardKernel` share.

    kv_head: the KV head of query head h; dims: run-time sizes among the arguments, in order
    program: scalars computed once per program; outer: values along the outer axis, loaded once per outer tile
    shared: bytes of shared memory that one block of each config must be allowed (`Target.shared`)
    rows: where the rows of q, k, v and o lie, those that are not in ordinary tensors
    """

    name: str
    grid: Grid
    kv_head: Expr
    dims: tuple[str, ...]
    program: tuple[Statement, ...]
    outer: tuple[Fetch, ...]
    regions: Regions
    step: Step
    softmax: Probabilities
    configs: tuple[TileConfig, ...]
    shared: tuple[SharedBytes, ...]
    rows: Mapping[str, Rows] = field(default_factory=dict)

    @property
    @abstractmethod
    def structure(self) -> Structure:
        """What programs own and what their inner loop runs over; it names the template."""

    @property
    @abstractmethod
    def walk(self) -> TileWalk:
        """What the number of a program's tile says."""

    def _walk(self, rows: str, *, is_padded: bool, writes_all_rows: bool) -> TileWalk:
        over_q, sequences = self.regions.axis == "kv", self.grid.sequences
        return TileWalk(
            axis="q" if over_q else "kv",
            rows=Dim(rows) if sequences is None else sequences.rows,
            is_padded=is_padded,
            head="h" if over_q or self.kv_head == Index("h") else "h_kv",
            heads="Hkv" if "G" in self.dims and not over_q else "H",
            sequences=sequences,
            last_first=self.grid.longest_first,
            writes_all_rows=writes_all_rows,
        )

    @property
    def score_expressions(self) -> Iterator[Expr]:
        return expressions_of(self.program, self.outer, self.regions, self.step)

    @property
    def expressions(self) -> Iterator[Expr]:
        return self.score_expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKernel(TileKernel):
    """A kernel that computes o: what `Forward` and `Decode` share.

    stored: rows of o that the program's sequence has, of which only the first M exist
    layout: how the kernel lies on the machine (None where a compiler decides it)
    epilogue: what becomes of the rows of o before they leave, None where they leave as they are
    segments: of keys whose sums start from nothing and are joined by the kernel itself, None: none are
    """

    softmax: Softmax
    configs: tuple[ForwardConfig, ...]
    bound: ErrorBound
    stored: Expr = M
    layout: Layout | None = None
    epilogue: Epilogue | None = None
    segments: Segments | None = None

    @property
    def walk(self) -> TileWalk:
        return self._walk("M", is_padded=False, writes_all_rows=True)

    @property
    def expressions(self) -> Iterator[Expr]:
        yield from (*self.score_expressions, *self.softmax.expressions)
        yield from () if self.epilogue is None else self.epilogue.expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(OutputKernel):
    """A kernel for many query rows. tma: K and V tiles may come through tensor descriptors; parts: of the
    columns of q and k, () where they are one; roles: what each warp does, where warps do different things.
    """

    tma: bool
    parts: tuple[DotPart, ...]
    roles: Roles | None = None

    @property
    def structure(self) -> Literal["forward_q_kv", "forward_kv_q"]:
        return "forward_q_kv" if self.regions.axis == "kv" else "forward_kv_q"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(OutputKernel):
    """A kernel for few query rows against many keys.

    pack: query heads of a KV head fill the rows of a tile; split: programs divide the keys of a row among
    them; parts: of the columns of q and k; unified: one maximum for all rows; of_tile: of tiles of heads.
    """

    pack: Pack | None
    split: Split | None
    parts: tuple[DotPart, ...]
    unified: UnifiedMax | None
    of_tile: Epilogue | None
    tma: ClassVar[bool] = False  # rows come by pointers: they are few, or lie in pages

    @property
    def walk(self) -> TileWalk:
        tiles = self._walk("M", is_padded=False, writes_all_rows=True)
        if self.pack is None:
            return tiles
        head: Literal["h_kv", ""] = "" if self.kv_head == Const(0) else "h_kv"
        heads: Literal["H", "Hkv"] = "H" if self.kv_head == Index("h") else "Hkv"
        return replace(tiles, head=head, heads=heads, group=self.pack.rows)

    @property
    def structure(self) -> Literal["decode"]:
        return "decode"


def expressions_of(
    program: tuple[Statement, ...], outer: tuple[Fetch, ...], loops: Regions, step: Step
) -> Iterator[Expr]:
    """Yields everything that a kernel evaluates for its scores."""
    for statement in (*program, *outer, *loops.statements, *step.fetches, *step.masked_fetches):
        yield from statement_expressions(statement)
    for loop in loops.loops:
        yield from loop.expressions
    for scale in step.scales:
        for fetch in scale.fetches:
            yield from statement_expressions(fetch)
        yield scale.value
    for expr in (step.score, step.keep, step.kept, step.v_scale):
        if expr is not None:
            yield expr
