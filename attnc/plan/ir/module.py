"""One file of generated/: its arguments and its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from attnc.expr.construct import ONE, ZERO, add, floordiv
from attnc.expr.nodes import Const, Expr
from attnc.model.attention import Variant
from attnc.model.tensors import Tensor
from attnc.plan.ir.backward import Backward, BackwardKernel
from attnc.plan.ir.kernel import ColumnScale, Decode, Fetch, Forward, Let, Pack, Split, Statement, UnifiedMax
from attnc.plan.ir.list_making import ListMaking
from attnc.plan.layout import KernelName, Which

#: Keys of the largest tile of a kernel that takes lists of several queries.
WIDEST_TILE = 256
#: Any GPU function over tiles.
Kernel: TypeAlias = Forward | Decode | BackwardKernel


def split_of(kernel: Kernel) -> Split | None:
    """Returns how programs share the keys of a row; None where one has them all."""
    return kernel.split if isinstance(kernel, Decode) else None


def pack_of(kernel: Kernel) -> Pack | None:
    """Returns which heads share a tile of rows; None where a tile has rows of one."""
    return None if isinstance(kernel, Forward) else kernel.pack


def unified_of(kernel: Kernel) -> UnifiedMax | None:
    """Returns the maximum that all rows subtract; None where each has its own."""
    return kernel.unified if isinstance(kernel, Decode) else None


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
class Margin:
    """By how much the bias of a key has to be below that of the query's own for kernels to leave it out: a
    number for each sequence and head, made of q and k before each call (`plan.decay`).
    """

    arg: Arg
    slope: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A tensor that is converted to q's type before the kernel that multiplies it. stored: as callers pass
    it; made: as the kernel takes it, contiguous, in the same place among its arguments; scale: of its
    columns.
    """

    stored: Arg
    made: Arg
    scale: ColumnScale | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is converted before the kernel. variant, args: as the kernel sees them, with k and v of q's type
    and without scales of columns. length: keys of sequence b, where they are fewer than rows; fetches: what
    it loads.
    """

    variant: Variant
    args: tuple[Arg, ...]
    tensors: tuple[Converted, ...]
    length: Expr | None
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """What kernels of gradients are given in the place of keys and values in pages. variant, args: as these
    kernels see them, with k and v as ordinary tensors; rows: those of the args that pages become. table: the
    input with the page of every `page` keys; length: keys of sequence b, of sizes and of inputs, where
    they are fewer than rows. rounded: inputs whose gradients are f32 for rows, since pages get sums of
    them, and of the input's type for pages.
    """

    variant: Variant
    args: tuple[Arg, ...]
    rows: tuple[Arg, ...]
    table: str
    page: int
    length: Expr
    rounded: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRows:
    """Of each query the rows in memory of the keys that its list names, that its sequence has and that the
    rest of the mask keeps.

    lines: sizes of what there is a list of: sequences, K/V heads where `by_head`, queries, or as many of them
    together as `queries` says. Such a list has all keys that any of these lists, and behind its rows a byte
    for each, with a bit for every query that lists it. entries: rows that a list has at most. packed:
    sequences of queries follow each other, and there is one line for each row of memory. marks: rows of
    memory that are no query of a sequence are told from others, since a denominator without keys would show:
    a sink, or what softpick adds. Their lists have the length -1; behind those of several queries stands how
    many of these are queries of a sequence, which come first.

    program: what is found of a list first, from `b`, `h_kv` and `query`, or the row of memory `query_row`;
    is_query: whether a query of a sequence has the list; indices: which list of the caller's it is made of;
    exists: whether there is one; limit: how many of its entries count, None: all. fetches, keep: of each key.
    first: row in memory of key 0; page: the load of the page of a key, None where keys follow each other;
    page_rows: rows that lie one behind the other, None: all. dims: sizes that these read.
    """

    lines: tuple[Expr, ...]
    entries: Expr
    by_head: bool
    packed: bool
    marks: bool
    queries: int
    program: tuple[Statement, ...]
    indices: tuple[Expr, ...]
    is_query: Expr
    exists: Expr
    limit: Expr | None
    fetches: tuple[Fetch, ...]
    keep: Expr
    first: Expr
    page: Fetch | None
    page_rows: Expr | None
    dims: tuple[str, ...]

    @property
    def members(self) -> Expr:
        if self.queries == 1:
            return ZERO
        return floordiv(add(self.entries, Const(WIDEST_TILE + 3)), Const(4))

    @property
    def stride(self) -> Expr:
        """Words of a list: how many rows, which, the bytes of each, and how many queries it is of."""
        counted = ONE if self.marks and self.queries > 1 else ZERO
        return add(add(self.entries, ONE), add(self.members, counted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of generated/: a variant, for a target, with its kernels and its callable's signature.

    kernel: makes o. sizes: what the host computes from the sizes of the arguments. kept: what the kernels can
    also write, and do when gradients are wanted: lse, where the spec does not ask for it, and the attention
    before an epilogue. label: of the schedule, where an attention has several for this target. lists: what is
    made of the lists of a mask before kernels walk over them; listed_rows: how, where these are lists of rows
    of memory; rows_of: the variant as a kernel sees it that takes all rows of a list, as it does `args`.
    margin: what is made of q and k, where kernels leave keys out by it. conversion: what of k and v is
    converted before `kernel` runs. key_rows: what kernels of gradients have in the place of keys in pages.
    """

    variant: Variant
    target: str
    args: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    kernel: Forward | Decode
    sizes: tuple[Let, ...] = ()
    kept: tuple[Arg, ...] = ()
    label: str = ""
    backward: Backward | None = None
    lists: ListMaking | None = None
    listed_rows: ListedRows | None = None
    rows_of: Variant | None = None
    margin: Margin | None = None
    conversion: Conversion | None = None
    key_rows: KeyRows | None = None

    @property
    def finds_blocks(self) -> bool:
        return self.lists is not None and self.lists.kept is not None

    @property
    def converted(self) -> Module:
        made = self.conversion
        return self if made is None else replace(self, variant=made.variant, args=made.args)

    @property
    def differentiated(self) -> Module:
        """The module as its kernels of gradients see it."""
        rows = self.key_rows
        if rows is None:
            return self.converted
        return replace(self, variant=rows.variant, args=rows.args, conversion=None)

    @property
    def seen(self) -> Module:
        """The module as its kernels see it that take all rows of a list."""
        return self if self.rows_of is None else replace(self, variant=self.rows_of)

    @property
    def taken(self) -> tuple[Arg, ...]:
        return self.args if self.margin is None else (*self.args, self.margin.arg)

    @property
    def backward_kernels(self) -> dict[KernelName, BackwardKernel]:
        return {} if self.backward is None else {planned.kind: planned for planned in self.backward.kernels}

    @property
    def kernels(self) -> dict[Which, Kernel]:
        found: dict[Which, Kernel] = {"forward": self.kernel}
        found.update(self.backward_kernels.items())
        return found
