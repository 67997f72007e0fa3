"""What scores and masks of a Hopper forward kernel read of keys, rows and pairs, as its templates place it.

What is computed once for a key or a row is decided by `plan.sm90.roles`.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Expr, Ref
from attnc.plan.ir import Fetch, Forward, Let, Statement
from attnc.plan.loads import axes_of
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.hoisting import Ends, Score
from attnc.plan.sm90.layout import Sm90Layout
from attnc.plan.sm90.roles import Softmax
from attnc.plan.sm90.scores import Column
from attnc.plan.sm90.softcap import Cap
from attnc.plan.steps import fetches_for
from attnc.target.sm80.printer import STORED, at_row, local, scalar, value_type
from attnc.target.sm90.tiles import BoxText


class ScoreText(BoxText):
    """What scores and masks read of keys, rows and pairs: by whom it is loaded, and where it lies."""

    kernel: Forward

    layout: Sm90Layout

    # -- what is loaded of each key --------------------------------------------------------------------------

    @property
    def _softmax(self) -> Softmax:
        return roles_of(self.kernel).softmax

    @property
    def _loaded(self) -> tuple[Fetch, ...]:
        """Loads with one value for each key of the tile."""
        return self._softmax.loaded

    def _vector_type(self, item: Fetch | Let) -> str:
        return value_type(item, self.dtypes[item.load.tensor]) if isinstance(item, Fetch) else "float"

    @property
    def score(self) -> Score | None:
        """The score, without what is computed once for a key or a row."""
        return self._softmax.score

    def row_of_score(self, let: Let) -> str:
        """Returns what the score reads of each row, or of all rows, at a thread's first key."""
        value = f"(float)({at_row(let.value)})"
        if not axes_of(let.value):
            return f"const float {let.name} = {value};"
        values = ", ".join(value.replace("[r]", f"[{r}]") for r in range(2))
        return f"const float {let.name}[ROWS] = {{{values}}};"

    @property
    def ends(self) -> Ends | None:
        """Where the keys of a row begin and end, if the mask of a partial tile says nothing else."""
        return self._softmax.ends

    @property
    def seen(self) -> str:
        """What a row keeps, by bits, of columns from 128 * w on."""
        assert self.ends is not None
        first, end = (
            None if end is None else f"columns_before({at_row(end)}, first_key + 128 * w)"
            for end in (self.ends.first, self.ends.end)
        )
        return f"{end} & ~{first}" if first and end else end or f"~{first}"

    @property
    def exponent_of_score(self) -> Expr | None:
        """What p is 2 to the power of, from a product, where that is more than a multiplication."""
        return self._softmax.exponent

    @property
    def cap(self) -> Cap | None:
        return self._softmax.cap

    @property
    def capped_exponent(self) -> Expr:
        """Of p by the polynomial."""
        assert self._softmax.near is not None
        return self._softmax.near

    @property
    def vectors(self) -> tuple[Fetch | Let, ...]:
        """What comes through shared memory, 4 bytes a key."""
        return self._softmax.vectors

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
    def wgmma_functions(self) -> list[str]:
        """And of columns, bf16 whatever the type of q and k."""
        columns = [f"WGMMA_RS_BF16({keys})" for keys in self.key_tiles if self.columns]
        return [*super().wgmma_functions, *columns]

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

    @property
    def pair_load(self) -> Fetch | None:
        """What comes as tiles of queries and keys."""
        return self._softmax.pair

    def _computed(self) -> tuple[Statement, ...]:
        return tuple(item for item in super()._computed() if item != self.pair_load)

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
