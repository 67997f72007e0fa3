"""The plan, on one page: everything that a template prints, and nothing that it would have to compute.

An `ir.Kernel` is one GPU function. Its expressions are trees of `expr.nodes` over names that exist in the
kernel text: `Index` (b, h, q_idx, q_pos, kv_idx, q_lo, q_hi, kv_lo, kv_hi), `Dim` (M, N, H, ... and the tile
symbols BLOCK_M, BLOCK_N) and `Ref` (values the plan named). Conventions: `q_lo`/`q_hi` are the first and the
*last* row of the query tile; loop bounds are half open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from attnc.expr.nodes import Dim, Expr, Load
from attnc.model.attention import Variant
from attnc.model.schedule import Config
from attnc.model.tensors import DType, Tensor
from attnc.plan.access import Rows, Sequences
from attnc.plan.ir_decode import Pack, Part, Split, UnifiedMax
from attnc.plan.layout import Layout
from attnc.source import Span

if TYPE_CHECKING:
    from attnc.plan.ir_backward import Backward

Axis: TypeAlias = Literal["q", "kv"]
M = Dim("M")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Drop with probability `p`.

    The keep-mask is Philox-4x32-10 of `seed` at (kv_idx // 4, q_idx, head, b), lane kv_idx % 4.
    """

    p: Expr
    seed: Expr
    head: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """How the rows are normalised.

    kind: "online" keeps a running maximum; "two_pass" finds m and l first and recomputes the scores.
    rescale (online): "deferred" divides once at the end (FlashAttention-2); "every_step" keeps o normalised
    (FlashAttention-1); "lazy" rescales only when the maximum has grown by more than `threshold` (in base-2
    units).
    headroom: 0, the maximum is looked for in every tile; else only until every row has one, and what
    exponents subtract lies so far (in base-2 units) above it that p says when it has grown by more.
    scale: factor of the raw score in the exponent, exp2(scale * s - m): set when score = scale * s with
    scale > 0, so that the multiplication fuses with the subtraction; None when the score is already in
    base-2 units.
    safe_everywhere: a full tile may consist of -inf scores too, so every step guards the subtraction of
    maxima.
    sink: base-2 logit that joins the denominator.
    """

    kind: Literal["online", "two_pass"]
    rescale: Literal["deferred", "every_step", "lazy"]
    threshold: float
    scale: float | None
    safe_everywhere: bool
    sink: Expr | None
    dropout: Dropout | None
    headroom: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens to one q tile x kv tile.

    fetches: loads made in every step; masked_fetches: those that only a partial tile needs;
    score: Expr of Dot (the text `s`), None when the raw dot product is used as it is;
    keep: the mask of a partial tile, the key sequence's end included; None when no tile is partial;
    kept: over kv_idx, what every key fulfils that some query of the sequence keeps (see `plan.excluded`); of
    others not even a NaN may count, so that their rows of v, and of k in the backward, are made zero; None
    where the mask implies nothing of the kind; kept_inside: what of it keys before the end of the last loop
    may still lack, and all of it where loops run over queries;
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
    """

    over: Literal["q", "kv", "head"]
    persistent: bool
    longest_first: bool
    sequences: Sequences | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """An axis of an argument: gives `name` its value, must equal `expected` (an Expr over names bound
    before), or neither, or both. plus: the axis is longer than `name` by so much.
    """

    name: str | None = None
    expected: Expr | None = None
    plus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """A tensor argument: how its axes bind sizes, the names of its strides in the kernel ("" for an axis that
    needs none).
    """

    tensor: Tensor
    axes: tuple[Bind, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBound:
    """Parameters of the componentwise forward error bound that the kernel promises (Blanchard, Higham,
    Higham; arXiv 1909.03469).

    Filled by the plan, evaluated by `verify.tolerance` together with the score's own running error analysis.

    tile_kv, min_tile_kv: most and fewest keys that one partial sum may hold, over all configs; the fewest
    give the number of tiles
    splits: partial results joined
    product_error, addition_error: of a product in a dot (0 where products are exact in f32), of an addition
    chained: the products of p and v, and those of a gradient, pass from tile to tile through one sum of the
    tensor cores
    exp_ulps: error of the target's exp2; intrinsics: (name, relative error, absolute error) of the functions
    of scores
    renormalised: o is rescaled at every step (FlashAttention-1), which adds roundings per tile
    largest_shift: how far what the exponent subtracts may be from the row's maximum, and from 0 (a unified
    maximum); least_probability: what the row's largest probability may be stored as
    """

    head_dim: int
    value_dim: int
    input_dtype: DType
    p_dtype: DType
    o_dtype: DType
    tile_kv: int
    min_tile_kv: int
    splits: int = 1
    product_error: float = 0.0
    addition_error: float = 1.5 * 2.0**-24
    chained: bool = False
    exp_ulps: float = 2.0
    intrinsics: tuple[tuple[str, float, float], ...] = ()
    renormalised: bool = False
    largest_shift: float = 0.0
    least_probability: float = 1.0

    def dot_error(self, length: int) -> float:
        """Of a sum of so many products, relative to the sum of their magnitudes."""
        return (length + 3) * self.addition_error + self.product_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One GPU function.

    structure: "forward_q_kv" (FlashAttention-2 loop order), "forward_kv_q" (FlashAttention-1's) or "decode",
    and for the backward what `ir_backward` says; it names the template.
    kv_head: the KV head of query head h; dims: run-time sizes among the arguments, in order
    program: scalars computed once per program; outer: values along the outer axis, loaded once per outer tile
    tma: K and V tiles may come through tensor descriptors
    shared: bytes of shared memory that one block of each config must be allowed (`Target.shared`)
    rows: where the rows of q, k, v and o lie, those that are not in ordinary tensors
    stored: rows of o that the program's sequence has, of which only the first M exist
    pack, split, parts, unified: see `ir_decode`, for the structure "decode" alone
    layout: how the kernel lies on the machine (None where a compiler decides it)
    """

    name: str
    structure: Literal["forward_q_kv", "forward_kv_q", "decode", "backward_dkdv", "backward_dq"]
    grid: Grid
    kv_head: Expr
    dims: tuple[str, ...]
    program: tuple[Statement, ...]
    outer: tuple[Fetch, ...]
    regions: Regions
    step: Step
    softmax: Softmax
    tma: bool
    configs: tuple[Config, ...]
    shared: tuple[int, ...]
    bound: ErrorBound
    rows: Mapping[str, Rows] = field(default_factory=dict)
    stored: Expr = M
    pack: Pack | None = None
    split: Split | None = None
    parts: tuple[Part, ...] = ()
    unified: UnifiedMax | None = None
    layout: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of generated/: a variant, for a target, with its kernels and its callable's signature.

    sizes: what the host computes from the sizes of the arguments.
    kept: what the kernels can also write, and do when gradients are wanted: lse, where the spec does not ask
    for it. label: of the schedule, where an attention has several for this target.
    """

    variant: Variant
    target: str
    args: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    kernels: tuple[Kernel, ...]
    sizes: tuple[Let, ...] = ()
    kept: tuple[Arg, ...] = ()
    label: str = ""
    backward: Backward | None = None
