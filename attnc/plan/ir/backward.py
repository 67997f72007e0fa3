"""The backward's part of the plan: what follows the scores of a tile when gradients are wanted.

    dP = dO V^T (dropped and rescaled as P was)      delta = rowsum(dO * O) - d lse
    dS = P * (dP - delta)                            dV = P^T dO
    d dot = dS * d score / d dot                     dQ = (d dot) K,  dK = (d dot)^T Q
    d x[at] = sum of dS * d score / d x[at] over the scores that read x[at]
    d sink  = sum over rows of exp(sink - lse) * -delta

Without a normalization P is the score, and dS = dP. With an epilogue o = f(a, x), O and dO above are the
attention a and its gradient, which a kernel makes first:

    da = d o * d f / d a      d x[at] += sum of d o * d f / d x[at]

P is recomputed from the saved lse (FlashAttention-2, arXiv 2307.08691, algorithm 2), never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.expr.finite import has_pole, is_finite, outgrows
from attnc.expr.nodes import Compare, Dim, Dot, Expr, Index, Load, Ref, show, walk
from attnc.expr.simplify import substitute
from attnc.model.schedule import BackwardConfig, DkDvConfig
from attnc.model.tensors import Tensor
from attnc.plan.access import Sequences, TileWalk
from attnc.plan.ir.bound import ErrorBound
from attnc.plan.ir.kernel import (
    Axis,
    DotPart,
    Fetch,
    Let,
    Pack,
    Statement,
    Structure,
    TileKernel,
    statement_expressions,
)
from attnc.plan.ir.lists import ListWalk
from attnc.plan.layout import BackwardLayout, KernelName, Roles
from attnc.source import Span

#: How results that several programs contribute to meet: each has a place of its own and the host sums them in
#: a fixed order, or they are added to one place in whatever order they arrive.
Accumulate: TypeAlias = Literal["two_pass", "atomic"]
#: How dq is summed where a kernel over kv tiles meets its rows again and again: in memory, by programs that
#: arrive in any order (FlashAttention-2), by programs that take turns, kv tile after kv tile, or by one
#: program for each head (FlashAttention-1).
InMemory: TypeAlias = Literal["atomic", "ordered", "sequential"]
Made: TypeAlias = Literal["dq", "dk", "dv"]
#: An axis of f32[B, H, M, N], or of f32[B, H, M, Dv], or a position on an axis that none of these is.
Place: TypeAlias = Literal["b", "h", "q_idx", "q_pos", "kv_idx", "d"] | int
#: What the results of tiles vary along: an axis of a tile, the columns of o, or the tiles.
Along: TypeAlias = Axis | Literal["d", "tile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjoint:
    """The gradient of one load of the score or the sink, as far as one kernel sums it.

    name: of the result in the kernel text; load: with the loads among its own indices replaced; value:
    d score / d load over the step's names; guard: where the load is inside its tensor and not simply 0.
    along: the tile axes that the load varies along; what it lacks is summed, in registers where it can be.
    two_pass: the result is f32[B, H, *along] (an entry per tile when `along` is empty), which the
    host sums over whatever else the tensor lacks; atomic: it is added to the f32 gradient itself, at the
    indices of the load. Of an epilogue, "d" are the columns of o, and "tile" the tiles of queries.
    """

    name: str
    load: Load
    value: Expr
    guard: Expr
    along: tuple[Along, ...]
    accumulate: Accumulate

    @property
    def is_finite(self) -> bool:
        return is_finite(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """How a step goes on from dS.

    scale: d score / d dot where that is one constant, applied once at the end; slope: else, per element.
    shared: values that the score and its derivatives have in common, by name, before both. adds_dq: the step
    adds its (d dot) K to a f32 dq in memory. factor: of a weight, one number for a sequence, left out
    of dS and P: dq, dk and dv are multiplied by it at the end.
    """

    scale: float
    slope: Expr | None
    shared: tuple[Let, ...]
    adjoints: tuple[Adjoint, ...]
    adds_dq: InMemory | None
    factor: Expr | None

    @property
    def slope_is_finite(self) -> bool:
        return self.slope is None or is_finite(self.slope)

    @property
    def slope_has_pole(self) -> bool:
        return self.slope is not None and has_pole(self.inline(self.slope))

    def inline(self, value: Expr) -> Expr:
        values: dict[Expr, Expr] = {
            node: let.value
            for let in self.shared
            for node in walk(value)
            if isinstance(node, Ref) and node.name == let.name
        }
        return substitute(value, values)

    @property
    def step_expressions(self) -> Iterator[Expr]:
        yield from (let.value for let in self.shared)
        if self.slope is not None:
            yield self.slope
        for adjoint in self.adjoints:
            yield from (adjoint.value, adjoint.guard)
            if adjoint.along == ("q", "kv"):
                yield from adjoint.load.indices

    @property
    def expressions(self) -> Iterator[Expr]:
        yield from self.step_expressions
        yield from () if self.factor is None else (self.factor,)
        for adjoint in self.adjoints:
            yield from adjoint.load.indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Prologue:
    """What the first kernel computes of each row: delta, and lse in base 2, which later kernels read
    (`stored`).

    Rows that saw nothing and rows past the end get lse = +inf, so that p = exp2(s - lse) = 0 without a test.
    sink: base-2 logit of the sink; adjoints: of what the sink loads, `value` being d sink / d load.
    """

    stored: bool
    sink: Expr | None
    adjoints: tuple[Adjoint, ...]


def walk_over_rows(sequences: Sequences | None) -> TileWalk:
    """Returns the walk of kernels that have a block for each q tile; sequences: of packed queries."""
    return TileWalk(
        axis="q",
        rows=Dim("M_padded") if sequences is None else sequences.rows,
        is_padded=True,
        head="h",
        heads="H",
        sequences=sequences,
        last_first=False,
        writes_all_rows=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """A kernel for the rows alone, a program per q tile, where no kernel that comes first owns q tiles.

    sequences: how tiles of packed queries are numbered.
    """

    name: str
    dims: tuple[str, ...]
    program: tuple[Statement, ...]
    prologue: Prologue
    sequences: Sequences | None = None

    @property
    def walk(self) -> TileWalk:
        return walk_over_rows(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueGradient:
    """A kernel that comes before all others, a program per q tile: the gradient of the attention from that of
    o, and those of what the epilogue loads.

    rows, fetches: what is loaded of each row, and of each column or both; slope: d o / d attention; adjoints:
    `value` being d o / d load; stored: rows that the sequence has in memory; sequences: how tiles of packed
    queries are numbered.
    """

    name: str
    dims: tuple[str, ...]
    program: tuple[Statement, ...]
    rows: tuple[Fetch, ...]
    fetches: tuple[Fetch, ...]
    slope: Expr
    adjoints: tuple[Adjoint, ...]
    stored: Expr
    sequences: Sequences | None
    span: Span | None

    @property
    def expressions(self) -> Iterator[Expr]:
        for statement in (*self.program, *self.rows, *self.fetches):
            yield from statement_expressions(statement)
        yield self.slope
        for adjoint in self.adjoints:
            yield from (adjoint.value, adjoint.guard, *adjoint.load.indices)

    @property
    def walk(self) -> TileWalk:
        return walk_over_rows(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDs:
    """ds of the tiles of listed blocks, which a kernel over keys leaves in memory: rounded, and in the order
    of the lists. line: the list of the tile of queries at hand, a row of bits of so many words; block: keys
    of a listed block.
    """

    line: Expr
    words: Expr
    block: int

    def __str__(self) -> str:
        return f"blocks of {self.block} of list_bits[{show(self.line)}: {show(self.words)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardKernel(TileKernel):
    """A kernel of a backward: p from the saved lse, and what follows from it.

    makes: the gradients that stay in its registers; prologue: what it does for later kernels; tma: tiles may
    come through tensor descriptors. parts: of the columns of q and k, () where they are one; v_in_k: values
    are the first columns of keys, so that dk is a sum of both, and whole parts have all that do has. pack:
    rows of a tile are heads of one query, or of several that list the same keys; selected: the list of a
    query, of whose keys a program owns a tile. What it makes of them is of this query alone, and added to
    sums in memory in the order of queries; adds: gradients of the keys that one query selects, which a
    program that makes dq adds to sums in memory, as it comes; keeps: whether one that makes dq leaves p and
    ds of each head and key in memory, of which these gradients are products; joined: parts of the columns in
    which rows of do and q are one operand. kept: ds that it leaves in memory, if there is room; takes_ds: it
    makes dq of that. roles: what each warp does, where warps do different things.
    """

    configs: tuple[BackwardConfig, ...]
    chain: Chain
    makes: tuple[Made, ...]
    tma: bool
    parts: tuple[DotPart, ...]
    v_in_k: bool
    prologue: Prologue | None
    pack: Pack | None = None
    selected: ListWalk | None = None
    adds: tuple[Made, ...] = ()
    keeps: bool = False
    joined: tuple[DotPart, ...] = ()
    kept: KeptDs | None = None
    takes_ds: bool = False
    roles: Roles | None = None

    @property
    def structure(self) -> Structure:
        """A program per q tile, or per kv tile (where those have an order, per head) with a loop over q; or
        per tile of heads of one query, of the keys that queries select, or of those that one selects; or as
        many as run at a time, which take query after query.
        """
        if self.adds:
            return "selected_tokens"
        if self.selected is not None:
            return "selected_turns"
        if self.pack is not None:
            return "selected_dq" if self.over_q else "selected_dkdv"
        if self.takes_ds:
            return "backward_dq_kept"
        return "backward_dq" if self.over_q else "backward_dkdv"

    @property
    def weighs(self) -> bool:
        return self.selected is not None and bool(self.joined)

    @property
    def kind(self) -> KernelName:
        return "dq_kept" if self.takes_ds else name_of(self.makes)

    @property
    def over_q(self) -> bool:
        return self.grid.over == "q"

    @property
    def config(self) -> str:
        return f"{name_of(self.makes)}_config"

    @property
    def dp_order(self) -> Literal["early", "late", "both"]:
        """When a step over a q tile computes dP; "both": as the config says."""
        if self.over_q or self.kind == "dv" or self.pack is not None:
            return "early"
        orders = {config.dp for config in self.configs if isinstance(config, DkDvConfig)}
        return "both" if len(orders) > 1 else "late" if "late" in orders else "early"

    @property
    def limits_registers(self) -> bool:
        return any(config.maxnreg is not None for config in self.configs)

    @property
    def sums_heads(self) -> bool:
        return "G" in self.dims and not self.over_q and self.pack is None

    @property
    def fills_keys(self) -> bool:
        """Whether a program that owns keys makes rows of k and v zero that no query keeps.

        Where it does not, their ds is made 0: nothing but dk and dv of the same key is computed from it.
        """
        if self.over_q or self.step.kept is None:
            return False
        chain = self.chain
        derivatives = (*(a.value for a in chain.adjoints), *(() if chain.slope is None else (chain.slope,)))
        reads_score = bool(chain.shared) or any(Dot() in walk(expr) for expr in derivatives)
        return reads_score or bool(chain.adjoints) or chain.adds_dq is not None

    @property
    def score_outgrows_lse(self) -> bool:
        """Whether p may be something else than 0 past the end, although lse is +inf there."""
        if self.step.score is None:
            return False
        score = self.chain.inline(self.step.score)
        sums = not self.over_q or bool(self.chain.adjoints) or bool(self.adds)
        return outgrows(score) or (sums and any(map(self._reads_past_the_end, walk(score))))

    def _reads_past_the_end(self, node: Expr) -> bool:
        """Returns whether it is a float of rows that may be anything behind the last one, such as an entry of
        a table that no row reads. Of a tensor with as many rows it is 0 there.
        """
        if not isinstance(node, Ref) or node.type != "float" or "q" not in node.axes:
            return False
        statements = (*self.program, *self.outer, *self.step.fetches)
        guards = (one.guard for one in statements if isinstance(one, Fetch) and one.name == node.name)
        return not any(end in walk(guard) for guard in guards for end in _ENDS_OF_ROWS)

    def uses(self, index: str) -> bool:
        return any(Index(index) in walk(expr) for expr in self.expressions)

    @property
    def walk(self) -> TileWalk:
        return self._walk("M_padded" if self.over_q else "N", is_padded=self.over_q, writes_all_rows=False)

    @property
    def expressions(self) -> Iterator[Expr]:
        yield from self.score_expressions
        yield from self.chain.expressions
        if self.selected is not None:
            yield from (self.selected.line, self.selected.stride)
        if self.kept is not None:
            yield from (self.kept.line, self.kept.words)


#: Guards of what has as many rows as queries, or keys that queries are among.
_ENDS_OF_ROWS = (
    Compare("<", Index("q_idx"), Dim("M")),
    Compare("<", Index("q_pos"), Dim("N")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """A summand of a tensor's gradient: the adjoint of this name, in a workspace of its own.

    places: what each axis of the tensor is in f32[B, H, *along]; the axes that none of them names are summed.
    Empty for atomic adjoints, which already have the tensor's shape.
    """

    name: str
    along: tuple[Along, ...]
    accumulate: Accumulate
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of an input: of q, k or v (no parts: a kernel writes it), or the sum of its parts."""

    tensor: Tensor
    parts: tuple[GradientPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBound:
    """Parameters of the error bound that the gradients keep, evaluated by `verify.gradient_bound`.

    forward: of o and lse, which the backward starts from; tile, min_tile: most and fewest rows or keys of one
    partial sum; scale: the factor of d score / d dot that is left out until the end.
    """

    forward: ErrorBound
    tile: int
    min_tile: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rounds in which the kernels of a backward run, each for some heads, as sizes say it.

    sizes: of a call; of_round: of a launch, which follow from the number `ROUND`; passed: those that kernels
    take; heads: query heads and K/V heads of a round; workspaces: types by name; forms: by kernel, fields of
    its config and when it runs so.
    """

    sizes: Mapping[str, str]
    of_round: Mapping[str, str]
    passed: tuple[str, ...]
    heads: tuple[str, str]
    workspaces: Mapping[str, str]
    forms: Mapping[str, Sequence[tuple[Mapping[str, str], str]]]

    @property
    def lines(self) -> Iterator[str]:
        """All that it says, as the text of a plan has it."""
        of_round = {f"{name} of a round": text for name, text in self.of_round.items()}
        for name, text in {**self.sizes, **of_round, **self.workspaces}.items():
            yield f"{name} = {text}"
        yield f"heads = {', '.join(self.heads)}, kernels take {', '.join(self.passed)}"
        for kernel, forms in self.forms.items():
            for changes, when in forms:
                yield ", ".join((f"{kernel} if {when}", *map(" = ".join, changes.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """All that follows from `grad ...` in a spec, in the order of execution; gradients in that of the
    inputs. layout: how the kernels lie on the machine (None where a compiler decides it); epilogue: what
    comes before all of them; last: what makes dq in place of the first, of ds that another has kept, where
    there is room for that; rounds: in which all of them run, where they do not run once.
    """

    preprocess: Preprocess | None
    kernels: tuple[BackwardKernel, ...]
    gradients: tuple[Gradient, ...]
    bound: GradientBound
    layout: BackwardLayout | None = None
    epilogue: EpilogueGradient | None = None
    last: BackwardKernel | None = None
    rounds: Rounds | None = None

    @property
    def all_kernels(self) -> tuple[BackwardKernel, ...]:
        """The kernels of which some run, in the order of execution."""
        return self.kernels if self.last is None else (*self.kernels, self.last)


def name_of(makes: tuple[Made, ...]) -> KernelName:
    """Returns the name of the kernel that makes these."""
    match makes:
        case ():
            return "rows"
        case (one,):
            return one
        case _:
            return "dkdv"
