"""What of a score and of a mask is not computed element by element: once for a key, by the warp that loads
what is asked of keys, or once for a row and tile.

An element pays for each of its instructions as often as the mask keeps elements, and at D = 128 five of
them take as long as its products. So an expression of the key alone (`bias[b, kv_idx] * log2(e)`) comes
through shared memory as one number; and of an integer that grows with the key (`q_pos - kv_idx`) a thread
converts its value at the thread's first key, from which those of its other keys differ by constants. Up
to 2^24 that is exact in float32, and beyond it is rounded twice (`verify.running_error`).

Of a mask that is an interval of keys for each row, a thread keeps the elements by bits. Where a row's
keys begin and end is known before any element is looked at. A word of bits for a row and tile takes some
ten instructions, and the compiler moves several of them to predicates at once, where comparisons with
both ends and an `and` would be three instructions for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from attnc.expr.affine import affine
from attnc.expr.construct import MIRRORED, add, maximum, minimum, mul, sub
from attnc.expr.nodes import (
    And,
    Binary,
    Call,
    Compare,
    CompareOp,
    Const,
    Dot,
    Expr,
    Index,
    Neg,
    Or,
    Ref,
    children,
    walk,
)
from attnc.expr.simplify import make, scale_by, substitute
from attnc.plan.ir import Fetch, Forward, Let, Statement
from attnc.plan.loads import axes_of
from attnc.plan.sm90.layout import Sm90Layout
from attnc.plan.sm90.scores import Column, columns_of, is_pair
from attnc.plan.sm90.softcap import Cap, cap_of
from attnc.plan.steps import fetches_for
from attnc.plan.width import is_wide
from attnc.target.sm80.printer import STORED, at_row, local, scalar, value_type
from attnc.target.sm90.tiles import BoxText, wgmma

_KEY = Index("kv_idx")
_ONE = Const(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """The first key that a row keeps, and the one behind the last; None where nothing bounds them."""

    first: Expr | None
    end: Expr | None


def row_ends(keep: Expr) -> Ends | None:
    """Returns the ends of a mask that is true between them alone; None for any other."""
    match keep:
        case And(operands=operands):
            return _joined(operands, maximum, minimum)
        case Or(operands=operands):
            found = _joined(operands, minimum, maximum)
            return found if found is None or None in (found.first, found.end) else None  # no hull
        case Compare(op=op, left=left, right=right) if left.type == right.type == "int":
            return _compared(op, left, right)
        case _:
            return None


def _joined(
    operands: tuple[Expr, ...],
    of_first: Callable[[Expr, Expr], Expr],
    of_end: Callable[[Expr, Expr], Expr],
) -> Ends | None:
    first: Expr | None = None
    end: Expr | None = None
    for operand in operands:
        found = row_ends(operand)
        if found is None:
            return None
        if found.first is not None:
            first = found.first if first is None else of_first(first, found.first)
        if found.end is not None:
            end = found.end if end is None else of_end(end, found.end)
    return Ends(first, end)


def _compared(op: CompareOp, left: Expr, right: Expr) -> Ends | None:
    """kv_idx, or a sum with it, beside a value of the row."""
    if left == _KEY:
        value = right
    elif right == _KEY:
        op, value = MIRRORED[op], left
    else:
        terms = affine(left) - affine(right)
        step = dict(terms.terms).get(_KEY, 0)
        if abs(step) != 1:
            return None
        value = ((terms - affine(_KEY) * step) * -step).expr
        op = op if step > 0 else MIRRORED[op]
    if op in ("<=", ">"):
        value = add(value, _ONE)
    if op in ("==", "!=") or "kv" in axes_of(value) or is_wide(value):
        return None
    return Ends(None, value) if op in ("<", "<=") else Ends(value, None)


#: Columns between a thread's first key and the one at hand, a constant; that first key.
COLUMN = Ref("column", "float", ("kv",))
FIRST_KEY = Ref("first_key", "int", natural=True, within=(0, 2**30))
#: Names of what is computed once; what finds none left stays where it is.
_AT_FIRST = ("at_first", "at_first_2", "at_first_3", "at_first_4")
_OF_KEY = ("of_key", "of_key_2", "of_key_3", "of_key_4")


@dataclass(frozen=True, slots=True)
class Score:
    """A score without its common parts. value: of an element; keys: values of each key; rows: floats of a
    row at a thread's first key, or of all rows. columns: what tensor cores add to
    `product`; of_row: what is left of a row.
    """

    value: Expr
    keys: tuple[Let, ...] = ()
    rows: tuple[Let, ...] = ()
    columns: tuple[Column, ...] = ()
    product: Expr | None = None
    of_row: Expr | None = None


def in_columns(score: Expr, mask: Expr) -> Score:
    """Returns the score of a layout whose tensor cores add what is not of the product."""
    found = columns_of(score, mask)
    assert found is not None
    value = found.product if found.row is None else add(found.product, Ref("of_row", "float", ("q",)))
    return Score(value, columns=found.terms, product=found.product, of_row=found.row)


def shared_score(score: Expr, vectors: Iterable[Fetch], elsewhere: Iterable[Expr]) -> Score:
    """Returns the score with those parts named. vectors: loads with a value for each key that come through
    shared memory; elsewhere: what reads loads besides.
    """
    loaded = tuple(vectors)
    taken = {fetch.name for fetch in fetches_for(loaded, *elsewhere)}
    parts = _Parts(frozenset(fetch.name for fetch in loaded), taken)
    value = parts.of_keys(score)
    if taken & {name for let in parts.keys for name in _names(let.value)} or _share(parts.keys):
        parts, value = _Parts(frozenset(), set()), score  # they would take more room than the loads
    value = parts.of_rows(value)
    return Score(value, tuple(parts.keys), tuple(parts.rows))


def product_exponent(score: Score, scale: float | None) -> Expr:
    """Returns what `exponent` does, where all but the product is of a row, and `base` has both that a row
    subtracts.
    """
    assert score.product is not None
    shift = Ref("m" if score.of_row is None else "base", "float", ("q",))
    return Binary("-", score.product if scale is None else scale_by(score.product, scale), shift)


def exponent(value: Expr, scale: float | None) -> Expr:
    """Returns scale * value - m, the subtraction where it meets the product: `(s * c - m) + bias` is one
    fused multiply-add less than `(s * c + bias) - m`. What it is rounded by is no more: |s c - m| <= |s c| +
    |m|.
    """
    return _minus(value if scale is None else scale_by(value, scale))


def _minus(expr: Expr) -> Expr:
    match expr:
        case Binary(op="+", left=left, right=right) if _has_product(right) and not _has_product(left):
            return Binary("+", left, _minus(right))
        case Binary(op="+" | "-" as op, left=left, right=right) if _has_product(left):
            return Binary(op, _minus(left), right)
        case _:
            return Binary("-", expr, Ref("m", "float", ("q",)))


def _has_product(expr: Expr) -> bool:
    return any(isinstance(node, Dot) for node in walk(expr))


@dataclass(slots=True)
class _Parts:
    vectors: frozenset[str]
    taken: set[str]
    keys: list[Let] = field(default_factory=list)
    rows: list[Let] = field(default_factory=list)

    def of_keys(self, expr: Expr) -> Expr:
        """Returns it with expressions of the key alone by name; loads that remain are taken."""
        if isinstance(expr, Ref):
            self.taken |= {expr.name} & self.vectors
            return expr
        alone = axes_of(expr) == ("kv",) and not _has_product(expr) and _KEY not in walk(expr)
        if expr.type == "float" and alone and _names(expr) & self.vectors:
            name = _named(self.keys, expr, _OF_KEY)
            if name is not None:
                return Ref(name, "float", ("kv",))
        return make(expr, tuple(map(self.of_keys, children(expr))))

    def of_rows(self, expr: Expr) -> Expr:
        """Returns it with integers that become floats, and grow with the key, by what they are at the first
        key.
        """
        if expr.type != "float":
            return expr
        return make(expr, tuple(self._as_float(child) for child in children(expr)))

    def _as_float(self, expr: Expr) -> Expr:
        match expr:
            case _ if expr.type != "int":
                return self.of_rows(expr)
            case Neg(operand=operand) | Call(function="abs", args=(operand,)):
                found = self._as_float(operand)
                return expr if found == operand else make(expr, (found,))
        terms = dict(affine(expr).terms)
        step = terms.pop(_KEY, 0)
        if not step or is_wide(expr) or any("kv" in axes_of(atom) for atom in terms):
            return expr
        start = substitute(expr, {_KEY: FIRST_KEY})
        name = _named(self.rows, start, _AT_FIRST)
        if name is None:
            return expr
        first = Ref(name, "float", axes_of(start))
        return add(first, mul(COLUMN, Const(step))) if step > 0 else sub(first, mul(COLUMN, Const(-step)))


def _named(lets: list[Let], value: Expr, names: tuple[str, ...]) -> str | None:
    """Returns the name of a value that is computed once; None if all names are taken."""
    known = next((let.name for let in lets if let.value == value), None)
    if known is None and len(lets) < len(names):
        known = names[len(lets)]
        lets.append(Let(name=known, value=value))
    return known


def _names(expr: Expr) -> set[str]:
    return {node.name for node in walk(expr) if isinstance(node, Ref)}


def _share(lets: Iterable[Let]) -> bool:
    """Returns whether two values read the same load."""
    names = [name for let in lets for name in _names(let.value)]
    return len(names) != len(set(names))


class ScoreText(BoxText):
    """What scores and masks read of keys, rows and pairs: by whom it is loaded, and where it lies."""

    kernel: Forward

    layout: Sm90Layout

    # -- what is loaded of each key --------------------------------------------------------------------------

    @cached_property
    def _loaded(self) -> tuple[Fetch, ...]:
        """Loads with one value for each key of the tile."""
        if not self.layout.vectors:
            return ()
        found = (*(() if self.layout.columns else super().score_fetches), *self.mask_fetches)
        return tuple(dict.fromkeys(fetch for fetch in found if self._is_vector(fetch)))

    def _is_vector(self, fetch: Fetch) -> bool:
        return fetch.axes == ("kv",) and self._vector_type(fetch) in ("float", "int", "bool")

    def _vector_type(self, item: Fetch | Let) -> str:
        return value_type(item, self.dtypes[item.load.tensor]) if isinstance(item, Fetch) else "float"

    @cached_property
    def score(self) -> Score | None:
        """The score, without what is computed once for a key or a row."""
        step = self.kernel.step
        if step.score is None:
            return None
        if self.layout.columns:
            return in_columns(step.score, self.module.variant.attention.mask)
        return shared_score(step.score, self._loaded, () if step.keep is None else (step.keep,))

    def row_of_score(self, let: Let) -> str:
        """Returns what the score reads of each row, or of all rows, at a thread's first key."""
        value = f"(float)({at_row(let.value)})"
        if not axes_of(let.value):
            return f"const float {let.name} = {value};"
        values = ", ".join(value.replace("[r]", f"[{r}]") for r in range(2))
        return f"const float {let.name}[ROWS] = {{{values}}};"

    @cached_property
    def ends(self) -> Ends | None:
        """Where the keys of a row begin and end, if the mask of a partial tile says nothing else."""
        keep = self.kernel.step.keep
        return None if keep is None else row_ends(keep)

    @property
    def seen(self) -> str:
        """What a row keeps, by bits, of columns from 128 * w on."""
        assert self.ends is not None
        first, end = (
            None if end is None else f"columns_before({at_row(end)}, first_key + 128 * w)"
            for end in (self.ends.first, self.ends.end)
        )
        return f"{end} & ~{first}" if first and end else end or f"~{first}"

    @cached_property
    def exponent_of_score(self) -> Expr | None:
        """What p is 2 to the power of, from a product, where that is more than a multiplication."""
        if self.score is None:
            return None
        scale = self.kernel.softmax.scale
        if self.score.columns:
            return product_exponent(self.score, scale)
        return exponent(self.score.value, scale)

    @cached_property
    def cap(self) -> Cap | None:
        """The score, if it is a capped product, of which most are small."""
        if self.score is None or not self.layout.capped:
            return None
        return cap_of(self.score.value, self.kernel.softmax.scale)

    @property
    def capped_exponent(self) -> Expr:
        """Of p by the polynomial."""
        assert self.cap is not None
        return exponent(self.cap.product, None)

    @cached_property
    def vectors(self) -> tuple[Fetch | Let, ...]:
        """What comes through shared memory, 4 bytes a key: values of the score, and what is loaded for those
        who multiply.
        """
        of_keys = () if self.score is None else self.score.keys
        return (
            *of_keys,
            *(fetch for fetch in self._loaded if fetch in (*self.score_fetches, *self.mask_fetches)),
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """Terms that tensor cores add, and those among them of numbers of keys."""
        return () if self.score is None else self.score.columns

    @property
    def key_columns(self) -> list[tuple[int, str]]:
        """Where a number of each key lies among those of its columns, and its value."""
        of_keys = ((i, column.of_key) for i, column in enumerate(self.columns))
        return [(3 * i, at_row(value)) for i, value in of_keys if value is not None]

    @property
    def number_columns(self) -> list[tuple[int, str]]:
        """Where the number of a key in its tile lies, and what a row multiplies it by."""
        return [(3 * i, at_row(x.factor)) for i, x in enumerate(self.columns) if x.of_key is None]

    @property
    def loads_keys(self) -> bool:
        """Whether a warp loads what is asked of keys."""
        return bool(self.vectors or self.key_columns)

    @property
    def is_loaded(self) -> bool:
        """Whether those who multiply read what others have loaded, besides tiles of q, k and v."""
        return bool(self.vectors or self.pair_load)

    @property
    def of_row(self) -> str:
        """What is left of a score but for its columns; empty if nothing is."""
        return "" if self.score is None or self.score.of_row is None else at_row(self.score.of_row)

    @property
    def columns_wgmma(self) -> str:
        """Of bf16 whatever the type of q and k, a width of its own for each tile of keys."""
        return "\n\n".join(
            wgmma(keys, "bf16", registers=True, by_rows=False, name="wgmma_bf16") for keys in self.key_tiles
        )

    @property
    def score_fetches(self) -> tuple[Fetch, ...]:
        return () if self.score is None else self._in_step(self.kernel.step.fetches, self.score.value)

    @property
    def vector_values(self) -> Iterator[str]:
        """Declarations of what is loaded of one key, and computed of it; other loads may say where."""
        loads = [x for x in dict.fromkeys((*super().score_fetches, *self.mask_fetches)) if x.axes == ("kv",)]
        of_keys = (column.of_key for column in self.columns)
        lets = [x for x in self.vectors if isinstance(x, Let)]
        lets += [Let(name="_", value=value) for value in of_keys if value is not None]
        loaded = [Ref(x.name, "float", ("kv",)) for x in self.vectors if isinstance(x, Fetch)]
        items: list[Statement] = [*fetches_for(loads, *loaded, *(let.value for let in lets)), *lets]
        yield from map(super().statement, (item for item in items if item.name != "_"))

    def as_word(self, vector: Fetch | Let) -> str:
        """Returns a value of one key as 4 bytes."""
        return f"(int){vector.name}" if self._vector_type(vector) == "bool" else vector.name

    def vector_places(self, *, of_score: bool) -> Iterator[str]:
        """Yields where a thread finds those of its first two keys; of_score: without what the mask alone
        asks.
        """
        for i, vector in enumerate(self.vectors):
            if not of_score or isinstance(vector, Let) or vector in self.score_fetches:
                place = f"X_AT + (x.index * VECTORS + {i}) * BLOCK_N * 4"
                yield f"const u32 {vector.name}_at = base + {place} + 8 * t;"

    def vector_statement(self, vector: Fetch | Let) -> str:
        """In a step, what was loaded of a key is there already: two neighbours at once."""
        kind, differs = self._vector_type(vector), " != 0" if self._vector_type(vector) == "bool" else ""
        value = f"of_pair<{kind.replace('bool', 'int')}>(load_shared<u64>({vector.name}_at + 32 * j), c)"
        return local(f"const {kind}", {vector.name: value + differs})

    def statement(self, item: Statement) -> str:
        if isinstance(item, Fetch) and item in self._loaded:
            return self.vector_statement(item)
        if isinstance(item, Fetch) and item == self.pair_load:
            return local("const float", {item.name: self._pair_value})
        return super().statement(item)

    # -- what is loaded of each query and key ----------------------------------------------------------------

    @cached_property
    def pair_load(self) -> Fetch | None:
        """What comes as tiles of queries and keys."""
        if not self.layout.pair_stages:
            return None
        found = (fetch for fetch in super().score_fetches if is_pair(fetch.load))
        return next(fetch for fetch in found if fetch not in self.mask_fetches and self._is_real(fetch))

    def _computed(self) -> tuple[Statement, ...]:
        return tuple(item for item in super()._computed() if item != self.pair_load)

    def _is_real(self, fetch: Fetch) -> bool:
        return self.dtypes[fetch.load.tensor].is_float

    @property
    def pair_by_fragments(self) -> bool:
        """Whether ldmatrix reads it, which has elements of 16 bits."""
        return self.layout.pair == 2

    @property
    def pair_place(self) -> str:
        """Where a box of its tile begins, but for its columns: row, and the axes before."""
        assert self.pair_load is not None
        others = [scalar(index) for index in reversed(self.pair_load.load.indices[:-2])]
        return ", ".join(["q_lo", *others, *["0"] * (2 - len(others))])

    @property
    def _pair_value(self) -> str:
        assert self.pair_load is not None
        if self.pair_by_fragments:
            return f"half_of<{STORED[self.dtypes[self.pair_load.load.tensor]]}>(values[j % 2 * 2 + r], c)"
        chunk = "(2 * j % 8 + t / 2 ^ g) * 16 + t % 2 * 8"
        return f"of_pair<float>(load_shared<u64>(pair_at + (j / 4 * BLOCK_M + 8 * r) * 128 + {chunk}), c)"
