"""Text of the kernels for gradients where every query selects keys by a list of its own: attribute by
attribute what `templates/triton/selected_*.py.jinja` print, and the declaration of launches and memory.

What a query makes of the keys that it selects goes to memory, for the queries of one turn; a kernel after it
sums over them, key by key. For that it has to know which place of a list a key has. Each query writes so for
the keys of its list alone, and a place counts only if the list has that key there: memory that nobody wrote
is told apart without being cleared (Briggs and Torczon, "An efficient representation for sparse sets", 1993).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attnc.expr.nodes import Const, Expr, show
from attnc.model.dtypes import DType
from attnc.plan.ir import Fetch, Module, Statement
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.ir.kernel import DotPart
from attnc.plan.ir.lists import ListWalk
from attnc.plan.signature import kv_heads
from attnc.target.declaration import CallText, declare_allocation
from attnc.target.kernel_view import BY_QUERY
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.kernel import list_types, triton_kernel, unique
from attnc.target.triton.parameters import Pair, Parameters, PrologueText, TritonTensors
from attnc.target.triton.printer import TL_DTYPES, scalar

#: Numbers of the memory of a turn, at most: 256 MiB.
TURN_FLOATS = 1 << 26
#: Warps of the kernel that sums.
_SUM_WARPS = 4


def _grouping(module: Module, kernel: BackwardKernel) -> tuple[str, str]:
    """Returns how many K/V heads there are, and query heads of one."""
    heads = kv_heads(module.variant.attention)
    group = Const(1) if kernel.pack is None else kernel.pack.group
    return "1" if heads == Const(1) else scalar(heads), scalar(group)


class SelectedParameters(Parameters):
    """Parameters of either kernel."""

    def __init__(
        self, module: Module, planned: BackwardKernel, tensors: TritonTensors, first: PrologueText | None
    ) -> None:
        super().__init__(module, planned, tensors, first, None)
        self.kv_heads, self.group = _grouping(module, planned)

    @property
    def matrices(self) -> list[str]:
        made = () if self.kernel.selected is None else self.makes
        return [name for name in super().matrices if name not in made]

    @property
    def _pointers(self) -> list[Pair]:
        own = () if self.kernel.selected is None else ("_lists", "_pairs", "_places")
        return [*super()._pointers, *((f"{name}_ptr", name) for name in own)]

    @property
    def sizes(self) -> list[str]:
        turns = [] if self.kernel.selected is None else ["list_places", "turn_queries", "turn"]
        return [*dict.fromkeys((*self.kernel.dims, "M_padded")), *turns]

    @property
    def signature(self) -> list[str]:
        return [", ".join(list_types(line)) for line in (*self.lines, ["BLOCK_M", "BLOCK_N"])]

    @property
    def launch(self) -> CallText:
        grid = f"M * B * {self.kv_heads} * cdiv({self.group}, BLOCK_M)"
        if self.kernel.selected is not None:
            grid = f"turn_queries * B * {self.kv_heads} * cdiv(list_places, BLOCK_N)"
        return triton_kernel(
            self.kernel.name,
            grid,
            pointers=[tensor for _, tensor in (*self._own, *self._pointers)],
            config=self.config,
            repeats="" if self.kernel.selected is None else "turns",
        )


class SelectedText(BackwardText):
    """Text of either kernel."""

    def __init__(self, module: Module, planned: BackwardKernel) -> None:
        super().__init__(module, planned)
        self.kv_heads, self.group = _grouping(module, planned)
        self.kv_name = "h_kv"
        self.selected = planned.selected
        if self.prologue is not None:
            self.first = PrologueText(
                module=module, prologue=self.prologue, tensors=self.tensors, masks_rows=True
            )
        self.parameters = SelectedParameters(module, planned, self.tensors, self.first)
        self.pair_columns = columns_of_pairs(self.tensors, planned)

    @property
    def rows_of_tile(self) -> list[str]:
        """q_idx and h of each row. Rows behind the last head are those of no query."""
        return [
            "head = head_lo + tl.arange(0, BLOCK_M)",
            f"h = h_kv * {_factor(self.group)} + tl.minimum(head, {self.group} - 1)",
            f"q_idx = tl.where(head < {self.group}, q_lo, M)",
        ]

    @property
    def first_row(self) -> str:
        return "(b * H + h).to(tl.int64) * M_padded"

    @property
    def advance(self) -> Iterator[str]:
        """Statements that move the pointers to keys to their head; rows of queries have their own."""
        for name in ("k", "v") if self.v == "v" else ("k",):
            yield f"{name.upper()} += {self.offset(name)}"

    @property
    def outer(self) -> tuple[Fetch, ...]:
        return self.of_keys

    @property
    def find_list(self) -> list[str]:
        return super().find_list if self.selected is None else find_list(self.selected)

    @property
    def full_lengths(self) -> Iterator[str]:
        yield from ()

    # -- tiles ---------------------------------------------------------------------------------------------

    def _tile(self, text: str, name: str, part: DotPart | None = None) -> str:
        """Returns the load of rows that lie anywhere: of some heads of one query, or of listed keys."""
        if name in BY_QUERY:
            rows, width = self._columns(f"{name.upper()} + {self.offset(name)}", name, part)
            return f"_gather_tile(({rows})[:, None], q_idx, M, stride_{name}m, {width})"
        text, width = self._columns(text, name, part)
        return f"_gather_tile({text}, kv_idx, N, stride_{name}n, {width})"

    def _store(self, name: str, value: str, part: DotPart | None) -> str:
        rows, width = self._columns(f"{name.upper()} + {self.offset(name)}", name, part)
        dtype = TL_DTYPES[DType(self.tensors.by_name[name].dtype)]
        tile = f"{self._scaled(name, value)}.to({dtype})"
        return f"_scatter_tile(({rows})[:, None], q_idx, M, stride_{name}m, {tile}, {width})"

    def _scaled(self, name: str, value: str) -> str:
        is_scaled = name != "dv" and self.chain.scale != 1.0
        return f"({value} * {scalar(Const(self.chain.scale))})" if is_scaled else value

    @property
    def pair_stores(self) -> Iterator[str]:
        """Stores of dk and dv of this query, one behind the other, at the places of its list."""
        for name in self.makes:
            parts: Sequence[DotPart | None] = [None] if name == "dv" else self.tensors.parts
            values = ["dv"] if name == "dv" else [part.dk for part in self.parts]
            for value, part in zip(values, parts, strict=True):
                first = (self.tensors.d if name == "dv" else 0) + (0 if part is None else part.first)
                _, width = self._columns("", name, part)
                at = f"pair + {first}" if first else "pair"
                # a place without a key is past the last one
                rows = f"tl.where(kv_idx < N_all, place, list_places), list_places, {self.pair_columns}"
                yield f"_scatter_tile({at}, {rows}, {self._scaled(name, value)}, {width})"

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def step_names(self) -> list[str]:
        if self.over_q:
            names = ["kv_idx" if name == "kv_lo" else name for name in super().step_names]
            return unique(name for name in names if name != "h" or self._step_takes_heads)
        step = self.kernel.step
        own = [*self.sums_of_tile, *(part.k for part in self.parts), *([] if self.v == "k" else ["v"])]
        own += ["Q", "DO", "LSE2", "DELTA", "b", "h_kv", "q_lo", "head_lo", "H", "M", "M_padded"]
        own += [name for name in (self.group,) if name.isidentifier()]
        own += [*self.tensors.strides("q"), *self.tensors.strides("do")]
        own += ["N"] if self.uses_q_pos else []
        own += ["kv_idx"] if self._step_reads("kv_idx") else []
        return unique((*own, *(name for name in step.names if name not in ("q_idx", "q_pos", "h"))))

    @property
    def _step_takes_heads(self) -> bool:
        return "h" in self.kernel.step.names

    @property
    def _constants(self) -> list[str]:
        masked = [self.masked] if self.kernel.step.keep is not None else []
        masked += ["ZERO_FILL"] if self.fills_when == "ZERO_FILL" else []
        return masked if self.over_q else [*masked, "BLOCK_M"]


def columns_of_pairs(tensors: TritonTensors, planned: BackwardKernel) -> int:
    """Returns how many numbers a query leaves of a key: dk, and dv where that is no part of it."""
    return tensors.d if planned.v_in_k else tensors.d + tensors.dv


def find_list(walk: ListWalk) -> list[str]:
    """Returns statements that find a list, and how many blocks it names."""
    line = scalar(walk.line)
    return [
        f"list_row = _{walk.memory}_ptr + {_at_line(walk)}",
        f"listed = _list_length(list_row, {line} >= 0)",
    ]


def _at_line(walk: ListWalk) -> str:
    return f"tl.cast({scalar(walk.line)}, tl.int64) * ({scalar(walk.stride)})"


def _factor(text: str) -> str:
    return text if text.isalnum() else f"({text})"


class SumText:
    """Text of the kernel that sums what queries made of their keys; pairs: that of the kernel before it."""

    def __init__(self, module: Module, pairs: SelectedText) -> None:
        assert pairs.selected is not None
        self._pairs, self._walk = pairs, pairs.selected
        self.tensors, self.kv_heads = pairs.tensors, pairs.kv_heads
        self.name = f"{module.variant.attention.name}_backward_sum"
        self.columns, self.block = pairs.pair_columns, pairs.selected.block

    @property
    def what(self) -> str:
        return " and ".join(self._pairs.makes)

    @property
    def find_line(self) -> tuple[Statement, ...]:
        """Statements that find the lists of eight queries, each at `q_lo`."""
        program = self._pairs.kernel.program
        return tuple(item for item in program if item.name == "list_line")

    @property
    def line(self) -> str:
        return _at_line(self._walk)

    @property
    def sizes(self) -> list[str]:
        return [*self._pairs.parameters.sizes, "turns"]

    @property
    def parameters(self) -> list[str]:
        made = [name.upper() for name in self._pairs.makes]
        pointers = ["_pairs_ptr", "_places_ptr", "_sums_ptr", "_lists_ptr", *made]
        strides = [self.tensors.strides(name) for name in self._pairs.makes]
        return [", ".join(line) for line in (pointers, *strides, self.sizes)]

    @property
    def stores(self) -> Iterator[str]:
        for name in self._pairs.makes:
            first = self.tensors.d if name == "dv" else 0
            dtype = TL_DTYPES[DType(self.tensors.by_name[name].dtype)]
            inside = f"(column >= {first})" if first else f"(column < {self.tensors.size(name)})"
            column = f"(column - {first})" if first else "column"
            yield f"{name.upper()} += {self.tensors.offset(name, 'h_kv')}"
            row = f"kv_idx.to(tl.int64)[:, None] * stride_{name}n"
            yield f"{name}_at = {name.upper()} + {row} + {column}[None, :]"
            yield f"tl.store({name}_at, acc.to({dtype}), mask=exists & {inside}[None, :])"

    @property
    def launch(self) -> CallText:
        pointers = ["_pairs", "_places", "_sums", "_lists", *self._pairs.makes]
        return triton_kernel(
            self.name,
            f"cdiv(N, 16) * B * {self.kv_heads}, {-(-self.columns // 64)}",
            pointers=pointers,
            config=self._pairs.kernel.config,
            warps=_SUM_WARPS,
            repeats="turns",
        )

    # -- memory --------------------------------------------------------------------------------------------

    def turn_sizes(self, entries: Expr) -> Mapping[str, str]:
        """Returns the sizes of a turn. entries: of a list."""
        places = show(entries) if self.block == 1 else f"{_factor(show(entries))} * {self.block}"
        numbers = f"B * {self.kv_heads} * (list_places * {self.columns} + N)"
        return {
            "list_places": places,
            "turn_queries": f"max(min(M, {TURN_FLOATS} // max({numbers}, 1)), 1)",
            "turns": "max(cdiv(M, turn_queries), 1)",
        }

    def list_allocations(self) -> Iterator[CallText]:
        """Yields the memory of a turn, which is never none: kernels run without keys and entries, too."""
        rows = f"turn_queries * B * {self.kv_heads}"
        yield declare_allocation("_pairs", f"f32[max({rows} * list_places * {self.columns}, 1)]")
        yield declare_allocation("_places", f"f32[max({rows} * N, 1)]")
        yield declare_allocation("_sums", f"f32[(turns > 1) * B * {self.kv_heads} * N * {self.columns}]")
