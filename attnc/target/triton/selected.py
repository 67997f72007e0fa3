"""Text of the kernels for gradients where every query selects keys by a list of its own: attribute by
attribute what `templates/triton/selected_*.py.jinja` print, and the declaration of launches and memory.

Where lists name single keys, queries add to sums in memory, in their order. A query has to wait for the one
before it alone: that one has waited for all others. Its tiles of keys ascend, and each stands for all keys up
to the next one, so that it passes on what it has waited for. Several copies of the sums shorten the chain of
queries that wait for each other: queries whose numbers have the same remainder share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnc.expr.nodes import Const, Expr, show
from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.plan.ir import Fetch, Module, Statement
from attnc.plan.ir.backward import BackwardKernel, Made
from attnc.plan.ir.kernel import DotPart
from attnc.plan.ir.lists import ListWalk
from attnc.plan.lists import KEPT, KV_HEAD
from attnc.plan.signature import kv_heads
from attnc.plan.steps import names_in, names_of
from attnc.target.declaration import CallText, declare_allocation
from attnc.target.kernel_view import BY_QUERY
from attnc.target.terms import factor, times
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.launch import triton_kernel
from attnc.target.triton.parameters import Pair, Parameters, PrologueText, TritonTensors
from attnc.target.triton.printer import TL_DTYPES, list_types, scalar, unique
from attnc.target.triton.printer import statement as show_statement

#: Tiles of keys of a query that make one copy of the sums enough, twice as many where weights are kept, and
#: more where tiles have fewer heads than 32: turns are short. Numbers of copies where there are more: 256 MiB
ENOUGH_TILES, _FEW_HEADS, COPIED_FLOATS = 32, 32, 1 << 26
#: Keys that are as many as whole tiles of any size.
_WHOLE_TILES = 256
#: Warps of the kernels before and after those that add to them.
_ORDER_WARPS, _SUM_WARPS = 4, 4


def _grouping(module: Module, kernel: BackwardKernel) -> tuple[str, str]:
    heads = kv_heads(module.variant.attention)
    group = Const(1) if kernel.pack is None else kernel.pack.group
    return "1" if heads == Const(1) else scalar(heads), scalar(group)


def keys_of_list(entries: str, block: int) -> str:
    return times(factor(entries), block)


def whole_tiles_of_list(entries: str, block: int) -> str:
    """Returns how many weights a head has: one for each key that a list can name, in whole tiles, as the host
    computes it.
    """
    return f"cdiv({keys_of_list(entries, block)}, {_WHOLE_TILES}) * {_WHOLE_TILES}"


class SelectedParameters(Parameters):
    """Parameters of a kernel that owns heads of a query, or keys that queries select."""

    def __init__(
        self, module: Module, planned: BackwardKernel, tensors: TritonTensors, first: PrologueText | None
    ) -> None:
        super().__init__(module, planned, tensors, first, None)
        self.kv_heads, self.group = _grouping(module, planned)

    @property
    def _keeps(self) -> bool:
        return self.kernel.keeps

    @property
    def _pointers(self) -> list[Pair]:
        kept = [("_weights_ptr", "_weights"), ("_ticket_ptr", "_ticket")] if self._keeps else []
        return [*super()._pointers, *kept]

    @property
    def sizes(self) -> list[str]:
        kept = ["chunk", "padded"] if self._keeps else []
        rows = self.tensors.packed_queries if self.tensors.packs(Role.QUERY) else "M_padded"
        return [*dict.fromkeys((*self.kernel.dims, rows)), *kept]

    @property
    def signature(self) -> list[str]:
        return [", ".join(list_types(line)) for line in (*self.lines, ["BLOCK_M", "BLOCK_N"])]

    @property
    def programs(self) -> str:
        queries = "chunk * B" if self._keeps else "M * B"
        if (sequences := self.kernel.grid.sequences) is not None:
            queries = f"({show(sequences.rows)} + B + 1)"
        return times(queries, self.kv_heads, f"cdiv({self.group}, BLOCK_M)")

    @property
    def rounds(self) -> str:
        return "rounds" if self._keeps else "1"

    @property
    def launch(self) -> CallText:
        return triton_kernel(
            self.kernel.name,
            self.programs,
            pointers=[tensor for _, tensor in (*self._own, *self._pointers)],
            config=self.config,
            rounds=self.rounds,
        )


class TurnParameters(SelectedParameters):
    """Parameters of a kernel whose programs add to sums in memory, in turn."""

    @property
    def weighs(self) -> bool:
        return self.kernel.weighs

    @property
    def matrices(self) -> list[str]:
        read = ("q", "do") if self.weighs else super().matrices
        return [name for name in read if name not in self.makes]

    @property
    def vectors(self) -> list[str]:
        return [] if self.weighs else super().vectors

    @property
    def _pointers(self) -> list[Pair]:
        own = ("_lists", "_order", "_sums", "_turns", *(("_weights",) if self.weighs else ()))
        return [*super()._pointers, *((f"{name}_ptr", name) for name in own)]

    @property
    def sizes(self) -> list[str]:
        kept = ["chunk", "padded"] if self.weighs else []
        return [*super().sizes, *kept, "key_tiles", "copies"]

    @property
    def extras(self) -> list[str]:
        return self._extras

    @property
    def programs(self) -> str:
        if self.weighs:
            return times("chunk * B", self.kv_heads, "key_tiles")
        return turns_of(self.kv_heads)

    @property
    def rounds(self) -> str:
        return "rounds" if self.weighs else "1"


@dataclass(frozen=True, slots=True)
class JoinedPartText:
    """Names of some columns of k, of rows of do and q, and of the sum of dq or dk; the load of those rows."""

    k: str
    rows: str
    sum: str
    load: str


class SelectedText(BackwardText):
    """Text of a kernel whose rows of q are heads of one query, all loaded by themselves."""

    parameters_type: type[SelectedParameters] = SelectedParameters
    parameters: SelectedParameters

    def __init__(self, module: Module, planned: BackwardKernel) -> None:
        super().__init__(module, planned)
        if planned.joined:
            self.tensors.parts = planned.joined
        self.kv_heads, self.group = _grouping(module, planned)
        self.kv_name = "h_kv"
        if self.prologue is not None:
            self.first = PrologueText(
                module=module, prologue=self.prologue, tensors=self.tensors, masks_rows=True
            )
        self.parameters = self.parameters_type(module, planned, self.tensors, self.first)

    @property
    def rows_of_tile(self) -> list[str]:
        return self.find_rows("tl.arange(0, BLOCK_M)")

    def find_rows(self, number: str) -> list[str]:
        """Returns statements that find q_idx and h of rows; those behind the last head are rows of no query.
        number: of each row of q in its tile.
        """
        return [
            f"head = head_lo + {number}",
            f"h = h_kv * {factor(self.group)} + tl.minimum(head, {self.group} - 1)",
            f"q_idx = tl.where(head < {self.group}, q_lo, M)",
        ]

    @property
    def joined(self) -> list[JoinedPartText]:
        """Parts of the columns of rows of do and q that are one operand; none where they are two operands."""
        found = []
        behind = f"((q_idx < M) & ({self.side_of_both} == 1))"
        for number, (text, part) in enumerate(zip(self.parts, self.kernel.joined, strict=False), 1):
            is_row = "(q_idx < M)" if part.first < self.tensors.dv else behind
            start = f"row + {part.first}" if part.first else "row"
            columns = f"tl.arange(0, {part.width})[None, :]"
            load = f"tl.load({start} + {columns}, mask={is_row}[:, None], other=0.0)"
            summed = text.dq if self.over_q else text.dk
            found.append(JoinedPartText(text.k, f"rows_{number}", summed, load))
        return found

    @property
    def head_of_both(self) -> str:
        """The head of a row of that operand. Eight rows of do come before those of q where a kernel keeps
        weights: a thread then holds the products of both rows of a head, and they stay in registers.
        """
        return "both // 16 * 8 + both % 8" if self.kernel.keeps else "both // 2"

    @property
    def side_of_both(self) -> str:
        return "both // 8 % 2" if self.kernel.keeps else "both % 2"

    def row_of(self, name: str) -> str:
        """Returns a pointer to the row of q or do of each head."""
        return f"{name.upper()} + {self.offset(name)} + q_idx.to(tl.int64) * stride_{name}m"

    @property
    def first_row(self) -> str:
        if self.packs_queries:
            return f"h.to(tl.int64) * {self.tensors.packed_queries} + q_first"
        return "(b * H + h).to(tl.int64) * M_padded"

    @property
    def advance(self) -> Iterator[str]:
        for name in self.parameters.matrices:
            if name not in BY_QUERY:
                yield f"{name.upper()} += {self.offset(name)}"

    @property
    def outer(self) -> tuple[Fetch, ...]:
        return self.of_keys

    @property
    def block(self) -> int:
        walks = (self.kernel.selected, *(loop.listed for loop in self.kernel.regions.loops))
        return next(walk.block for walk in walks if walk is not None)

    @property
    def entries(self) -> Expr:
        assert self.module.lists is not None
        return self.module.lists.extents[-1]

    @property
    def wide(self) -> str:
        tiles = f"tl.cdiv({keys_of_list(scalar(self.entries), self.block)}, {_WHOLE_TILES})"
        return f"tl.cast({tiles}, tl.int64) * {_WHOLE_TILES}"

    @property
    def full_lengths(self) -> Iterator[str]:
        yield from ()

    @property
    def weight_of_value(self) -> str:
        """What a row of do is multiplied by in dv."""
        if self.kernel.softmax.dropout is not None:
            return "tl.where(kept, p * keep_scale, 0.0)"
        return "picked" if self.form.picked else "p"

    # -- tiles ---------------------------------------------------------------------------------------------

    def _tile(self, text: str, name: str, part: DotPart | None = None) -> str:
        if name in BY_QUERY:
            rows, width = self._columns(f"{name.upper()} + {self.offset(name)}", name, part)
            return f"_gather_tile(({rows})[:, None], q_idx, M, stride_{name}m, {width})"
        text, width = self._columns(text, name, part)
        return f"_gather_tile({text}, kv_idx, N, stride_{name}n, {width})"

    def _store(self, name: str, value: str, part: DotPart | None) -> str:
        dtype = TL_DTYPES[DType(self.tensors.by_name[name].dtype)]
        tile = f"{self._scale(name, value)}.to({dtype})"
        if name in BY_QUERY:
            rows, width = self._columns(f"{name.upper()} + {self.offset(name)}", name, part)
            return f"_scatter_tile(({rows})[:, None], q_idx, M, stride_{name}m, {tile}, {width})"
        rows, width = self._columns(name.upper(), name, part)
        return f"_scatter_tile({rows}, kv_idx, N_all, stride_{name}n, {tile}, {width})"

    def _scale(self, name: str, value: str) -> str:
        is_scaled = name != "dv" and self.chain.scale != 1.0
        return f"({value} * {scalar(Const(self.chain.scale))})" if is_scaled else value

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def step_names(self) -> list[str]:
        names = ["kv_idx" if name == "kv_lo" else name for name in super().step_names]
        if self.kernel.joined:
            apart = {"do", *(part.q for part in self.parts)}
            names = [name for name in names if name not in apart]
            names = [*self.sums_of_tile, *(part.rows for part in self.joined), *names]
        names += ["weight_rows", "list_item", "apart"] if self.kernel.keeps else []
        return unique(name for name in names if name != "h" or "h" in self.kernel.step.names)

    @property
    def _constants(self) -> list[str]:
        masked = [self.masked] if self.kernel.step.keep is not None else []
        masked += ["ZERO_FILL"] if self.fills_when == "ZERO_FILL" else []
        reads_tile = self.kernel.joined or self.kernel.keeps or self.kernel.softmax.dropout is not None
        return [*masked, *(["BLOCK_M", "BLOCK_N"] if reads_tile else [])]


class KeysText(SelectedText):
    """Text of a kernel that owns keys, which queries select."""

    #: What rows are told by, besides b and h_kv.
    row_names: Sequence[str] = ()

    @property
    def step_names(self) -> list[str]:
        step = self.kernel.step
        own = [*self.sums_of_tile, *(part.k for part in self.parts), *([] if self.v == "k" else ["v"])]
        own += ["Q", "DO", "LSE2", "DELTA", "b", "h_kv", *self.row_names, "H", "M"]
        own += ["q_first", self.tensors.packed_queries] if self.packs_queries else ["M_padded"]
        own += [name for name in (self.group,) if name.isidentifier()]
        own += [*self.tensors.strides("q"), *self.tensors.strides("do")]
        own += ["N"] if self.uses_q_pos else []
        reads_keys = self._step_reads("kv_idx") or self.kernel.softmax.dropout is not None
        own += ["kv_idx"] if reads_keys else []
        return unique((*own, *(name for name in step.names if name not in ("q_idx", "q_pos", "h"))))

    @property
    def _constants(self) -> list[str]:
        return unique((*super()._constants, "BLOCK_M"))


class TurnText(KeysText):
    """Text of a kernel that owns a tile of the keys of one query, and adds to their sums in turn."""

    parameters_type = TurnParameters
    parameters: TurnParameters
    row_names = ("q_lo", "head_lo")

    def __init__(self, module: Module, planned: BackwardKernel) -> None:
        super().__init__(module, planned)
        assert planned.selected is not None
        self.selected = planned.selected
        self.columns = columns_of_sums(self.tensors, planned)
        self.weighs = self.parameters.weighs

    @property
    def step_names(self) -> list[str]:
        if not self.weighs:
            return super().step_names
        sizes = [name for name in (self.group,) if name.isidentifier()]
        own = [
            *self.sums_of_tile,
            "weights",
            "apart",
            "wide",
            "Q",
            "DO",
            "b",
            "h_kv",
            *self.row_names,
            *sizes,
            "M",
        ]
        return unique((*own, *self.tensors.strides("q"), *self.tensors.strides("do")))

    @property
    def _constants(self) -> list[str]:
        return ["BLOCK_M", "BLOCK_N"] if self.weighs else super()._constants

    @property
    def chains(self) -> str:
        return factor(times("copies * B", self.kv_heads))

    @property
    def chains_of_copy(self) -> str:
        return factor(times("B", self.kv_heads))

    @property
    def find_list(self) -> list[str]:
        return find_list(self, "list_row", "listed")

    @property
    def additions(self) -> Iterator[str]:
        for name in self.makes:
            parts: Sequence[DotPart | None] = [None] if name == "dv" else self.tensors.parts
            values = ["dv"] if name == "dv" else [part.dk for part in self.parts]
            for value, part in zip(values, parts, strict=True):
                first = (self.tensors.d if name == "dv" else 0) + (0 if part is None else part.first)
                _, width = self._columns("", name, part)
                at = f"sums + {first}" if first else "sums"
                yield f"_add_tile({at}, kv_idx, N_all, {self.columns}, {self._scale(name, value)}, {width})"


def find_list(turns: TurnText, row: str, length: str) -> list[str]:
    """Returns statements that find the list of the query at hand, and how many blocks it names."""
    walk, program = turns.selected, turns.kernel.program
    line = scalar(walk.line)
    return [
        *(show_statement(item) for item in program if item.name == "list_line"),
        f"{row} = _{walk.memory}_ptr + {_at_line(walk)}",
        f"{length} = _list_length({row}, ({line} >= 0) & (q_lo < M))",
    ]


def lists_of(heads: str, *, in_rounds: bool = False) -> str:
    """Returns how many lists programs are there for, with those past the last query of a copy, or round."""
    queries = "rounds * chunk" if in_rounds else "cdiv(M, copies) * copies"
    return times(queries, "B", heads)


def turns_of(heads: str, *, in_rounds: bool = False) -> str:
    return f"{lists_of(heads, in_rounds=in_rounds)} * key_tiles"


def columns_of_sums(tensors: TritonTensors, planned: BackwardKernel) -> int:
    """Returns how many numbers a key has in memory: dk, and dv where that is no part of it."""
    return tensors.d if planned.v_in_k else tensors.d + tensors.dv


def _at_line(walk: ListWalk) -> str:
    return f"tl.cast({scalar(walk.line)}, tl.int64) * ({scalar(walk.stride)})"


class OrderText:
    """Text of the kernel that finds which tiles each one waits for. turns: that of the kernel that waits."""

    def __init__(self, module: Module, turns: TurnText) -> None:
        self._turns = turns
        self.kv_heads, self.chains, self.block = turns.kv_heads, turns.chains, turns.selected.block
        self.name = f"{module.variant.attention.name}_backward_order"

    @property
    def program(self) -> Iterator[Statement]:
        return (item for item in self._turns.kernel.program if item.name != "list_line")

    @property
    def reads_kv_head(self) -> bool:
        walk = self._turns.selected
        read = (*map(names_in, self._turns.kernel.program), names_of(walk.line), names_of(walk.stride))
        return any(KV_HEAD.name in names for names in read)

    @property
    def find_list(self) -> list[str]:
        return self._turns.find_list

    @property
    def find_list_before(self) -> list[str]:
        return find_list(self._turns, "row_before", "listed_before")

    @property
    def sizes(self) -> list[str]:
        return self._turns.parameters.sizes

    @property
    def _extras(self) -> list[str]:
        return self._turns.parameters.extras

    @property
    def parameters(self) -> list[str]:
        extras = [f"{name}_ptr" for name in self._extras]
        strides = [self._turns.tensors.extra_strides(name, name) for name in self._extras]
        lines = [["_lists_ptr", "_order_ptr", *extras], *(line for line in strides if line), self.sizes]
        return [*(", ".join(list_types(line)) for line in lines), "BLOCK_N: tl.constexpr"]

    @property
    def launch(self) -> CallText:
        return triton_kernel(
            self.name,
            lists_of(self.kv_heads, in_rounds=self._turns.weighs),
            pointers=["_lists", "_order", *self._extras],
            config=self._turns.kernel.config,
            warps=_ORDER_WARPS,
        )


class SumText:
    """Text of the kernel that makes gradients of the sums in memory. adds: the text of the kernel before it;
    makes: the gradients; block: keys of an entry of a list.
    """

    def __init__(self, module: Module, adds: SelectedText, makes: Sequence[Made], block: int) -> None:
        self._makes, self._config, self._adds = makes, adds.kernel.config, adds
        self.tensors, self.kv_heads, self.block = adds.tensors, adds.kv_heads, block
        self.name = f"{module.variant.attention.name}_backward_sum"
        self.columns = columns_of_sums(adds.tensors, adds.kernel)

    @property
    def what(self) -> str:
        return " and ".join(self._makes)

    @property
    def sizes(self) -> list[str]:
        heads = [self.kv_heads] if self.kv_heads.isidentifier() else []
        return ["B", *heads, "N", "copies"]

    @property
    def parameters(self) -> list[str]:
        made = [name.upper() for name in self._makes]
        strides = [self.tensors.strides(name) for name in self._makes]
        return [", ".join(line) for line in (["_sums_ptr", *made], *strides, self.sizes)]

    @property
    def stores(self) -> Iterator[str]:
        for name in self._makes:
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
        return triton_kernel(
            self.name,
            f"{times('cdiv(N, 16) * B', self.kv_heads)}, {-(-self.columns // 64)}",
            pointers=["_sums", *self._makes],
            config=self._config,
            warps=_SUM_WARPS,
        )

    # -- memory --------------------------------------------------------------------------------------------

    def memory_sizes(self, entries: Expr) -> Mapping[str, str]:
        """Returns tiles of keys of a query, and copies of the sums. entries: of a list."""
        tiles = f"cdiv({keys_of_list(show(entries), self.block)}, {self._config}.BLOCK_N)"
        numbers = times("B", self.kv_heads, "N", self.columns)
        enough = str(ENOUGH_TILES)
        if self._weighs:
            enough = f"max({2 * ENOUGH_TILES}, {2 * ENOUGH_TILES * _FEW_HEADS} // dq_config.BLOCK_M)"
        shared = f"{enough} // (key_tiles * max({times('B', self.kv_heads)}, 1))"
        copies = f"min(M, {shared}, {COPIED_FLOATS} // max({numbers}, 1))"
        sizes = {"key_tiles": f"max({tiles}, 1)", "copies": f"max({copies}, 1)"}
        return {**sizes, **self._sizes_of_rounds(show(entries))} if self._weighs else sizes

    @property
    def _weighs(self) -> bool:
        return isinstance(self._adds, TurnText) and self._adds.weighs

    def _sizes_of_rounds(self, entries: str) -> Mapping[str, str]:
        """Returns heads of a query in whole tiles, weights of one, queries whose weights are kept at a time,
        as many of each copy, and how often.
        """
        group = self._adds.group
        weights = times("2 * padded", whole_tiles_of_list(entries, self.block), "B", self.kv_heads)
        return {
            "padded": f"cdiv({group}, dq_config.BLOCK_M) * dq_config.BLOCK_M",
            "weights": weights,
            "chunk": f"max(min(cdiv(M, copies), {KEPT} // max(weights, 1) // copies), 1) * copies",
            "rounds": "cdiv(M, chunk)",
        }

    def list_allocations(self) -> Iterator[CallText]:
        """Yields the sums, what programs wait for, and which have had their turn; in front of these, how many
        have begun.
        """
        numbers = times("copies * B", self.kv_heads, "N", self.columns)
        yield declare_allocation("_sums", f"f32[max({numbers}, 1)]", zero=True)
        programs = turns_of(self.kv_heads, in_rounds=self._weighs)
        yield declare_allocation("_order", f"i32[max({programs} * 2, 1)]")
        yield declare_allocation("_turns", f"i32[{programs} + 1]", zero=True)
        if self._weighs:
            dtype = self._adds.module.variant.attention.q.dtype
            # also where lists have no entries: each has a first tile, whose weights are read
            yield declare_allocation("_weights", f"{dtype}[max(chunk * weights, {_WHOLE_TILES})]")
            yield declare_allocation("_ticket", "i32[1]", zero=True)
