"""What scores and masks of a Hopper forward kernel read of keys, rows and pairs, as its templates place it.

What is computed once for a key or a row is decided by `plan.sm90.roles`.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.model.attention import Variant
from attnc.model.dtypes import DType
from attnc.plan.ir import Fetch, Forward, Let, Statement
from attnc.plan.loads import axes_of
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.layout import Sm90Layout
from attnc.target.sm80.printer import at_row, local, scalar, statement, stored_type, value_type
from attnc.target.sm80.step import Step


class Scores:
    """What the roles of a kernel read of keys, rows and pairs for scores and masks, and where it lies.

    planned: what is not computed element by element; fetches: loads of an element; of_row: the part of the
    score that all keys of a row share; vector_values: what is computed of each key; key_columns: where the
    three bf16 of a number of each key lie among those of its columns, and its value; number_columns: the same
    of the factors of rows that the number of a key is multiplied by.
    """

    def __init__(
        self, kernel: Forward, layout: Sm90Layout, step: Step, dtypes: dict[str, DType], variant: Variant
    ) -> None:
        self.planned = planned = roles_of(kernel).softmax
        self.pair_by_fragments = layout.pair == 2
        self._dtypes, self._variant = dtypes, variant
        placed = [(range(3 * i, 3 * i + 3), column) for i, column in enumerate(planned.columns)]
        self.key_columns = [(*at, at_row(x.of_key)) for at, x in placed if x.of_key is not None]
        self.number_columns = [(*at, at_row(x.factor)) for at, x in placed if x.of_key is None]
        parts = planned.score
        self.of_row = "" if parts is None or parts.of_row is None else at_row(parts.of_row)
        value = None if parts is None else parts.value
        self.fetches = step.fetches_along_keys(kernel.step.fetches, value)
        self._of_mask, self._of_values = step.mask_fetches, step.value_fetches
        self.vector_values = [statement(item, dtypes, kernel.dims) for item in planned.of_keys]

    # -- what is loaded of each key --------------------------------------------------------------------------

    def _vector_type(self, item: Fetch | Let) -> str:
        return value_type(item, self._dtypes[item.load.tensor]) if isinstance(item, Fetch) else "float"

    def row(self, let: Let) -> str:
        """Returns what the score reads of each row, or of all rows, at a thread's first key."""
        value = f"(float)({at_row(let.value)})"
        if not axes_of(let.value):
            return f"const float {let.name} = {value};"
        values = ", ".join(value.replace("[r]", f"[{r}]") for r in range(2))
        return f"const float {let.name}[ROWS] = {{{values}}};"

    @property
    def words(self) -> Iterator[tuple[int, str]]:
        named = (f"{'(int)' * (self._vector_type(x) == 'bool')}{x.name}" for x in self.planned.vectors)
        return enumerate((*named, *(value for *_, value in self.key_columns)))

    def score_vectors(self, *, with_mask: bool) -> Iterator[tuple[str, int]]:
        """Returns the names and numbers of what the score reads; with_mask: and the mask."""
        read = (*self.fetches, *(self._of_mask if with_mask else ()))
        return ((x.name, i) for i, x in enumerate(self.planned.vectors) if isinstance(x, Let) or x in read)

    @property
    def value_vectors(self) -> Iterator[tuple[str, int]]:
        return ((x.name, i) for i, x in enumerate(self.planned.vectors) if x in self._of_values)

    def vector_statement(self, vector: Fetch | Let) -> str:
        """In a step, what was loaded of a key is there already: two neighbours at once."""
        kind, differs = self._vector_type(vector), " != 0" if self._vector_type(vector) == "bool" else ""
        value = f"of_pair<{kind.replace('bool', 'int')}>(load_shared<u64>({vector.name}_at + 32 * j), c)"
        return local(f"const {kind}", {vector.name: value + differs})

    # -- what is loaded of each query and key ----------------------------------------------------------------

    def pair_place(self, pair: Fetch) -> str:
        others = [scalar(index) for index in reversed(pair.load.indices[:-2])]
        return ", ".join(["q_lo", *others, *["0"] * (2 - len(others))])

    def pair_value(self, pair: Fetch) -> str:
        if self.pair_by_fragments:
            stored = stored_type(self._dtypes[pair.load.tensor], self._variant)
            return f"half_of<{stored}>(values[j % 2 * 2 + r], c)"
        chunk = "(2 * j % 8 + t / 2 ^ g) * 16 + t % 2 * 8"
        return f"of_pair<float>(load_shared<u64>(pair_at + (j / 4 * BLOCK_M + 8 * r) * 128 + {chunk}), c)"


class Sm90Step(Step):
    """As for `cuda.sm_80`, where values of keys and pairs come through shared memory."""

    def __init__(self, kernel: Forward, dtypes: dict[str, DType], scores: Scores) -> None:
        super().__init__(kernel, dtypes)
        self._scores = scores

    def statement(self, item: Statement) -> str:
        if isinstance(item, Fetch) and item in self._scores.planned.loaded:
            return self._scores.vector_statement(item)
        if isinstance(item, Fetch) and item == self._scores.planned.pair:
            return local("const float", {item.name: self._scores.pair_value(item)})
        return super().statement(item)
