"""The kernels that make lists of blocks ready for a walk: what `templates/triton/_lists.py.jinja` prints, and
the declarations of their launches and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attnc.expr.nodes import FALSE, TRUE, Expr, Load, show
from attnc.plan.ir import Module, Statement
from attnc.plan.ir.list_making import Extreme, KeptBlocks, ListMaking
from attnc.plan.lists import BLOCKS, KV_HEAD, LIST_ROWS, lists_packed_rows
from attnc.plan.signature import block
from attnc.target.declaration import CallText, declare_allocation, show_product
from attnc.target.lists import Lists
from attnc.target.triton.launch import triton_kernel
from attnc.target.triton.printer import scalar, statement

#: Of a program, which has few elements: several would wait for each other at every sum.
_WARPS = 1
#: Of a program that finds blocks which a mask keeps; keys whose ends are found at a time, and queries that
#: are looked at pair by pair.
_FINDING_WARPS, _FOUND_KEYS, _QUERIES = 4, 4096, 32
#: Queries of a list, equally far from each other, that all its blocks are tried with first.
_TRIED = 4
#: Entries of a list that are compared with blocks at a time. Lists of one query have few: 16 in NSA and MSA.
_ENTRIES, _ENTRIES_OF_QUERY = 64, 16
#: Of a program that inverts lists: blocks of keys, which are in one word, and of queries at a time.
_INVERTING_WARPS, _COLUMNS, _ROWS = 4, 4, 512
#: Of a program that sorts lists; programs, and marks of all of them, 64 MiB.
_SORTING_WARPS, _MOST_SORTING, _MARKS = 4, 1024, 1 << 24


class ListsText(Lists):
    """Text of the kernels. inverts: there is one for a backward that walks over queries; sorts: there is one
    for a backward that needs entries ascending, where the first one leaves them in the order of the list.
    """

    def __init__(self, module: Module, made: ListMaking) -> None:
        self.module, self.made = module, made
        self.tensor, self.by_entry, self.is_distinct = made.tensor, made.by_entry, made.is_distinct
        self.name = module.variant.attention.name
        kernels = () if module.backward is None else module.backward.kernels
        walks = (loop.listed for planned in kernels for loop in planned.regions.loops)
        self.inverts = any(walk is not None and walk.memory == "columns" for walk in walks)
        self.cuts_columns = self.inverts and lists_packed_rows(module.variant.attention)
        self.sorts = any(planned.selected is not None or planned.adds for planned in kernels)
        self.kept = made.kept

    def print_scalar(self, expr: Expr) -> str:
        return scalar(expr)

    @property
    def listing_name(self) -> str:
        return f"{self.name}_lists"

    @property
    def finding_name(self) -> str:
        return f"{self.name}_kept_blocks"

    columns_of_program, rows_of_program = _COLUMNS, _ROWS
    queries_at_once, tried = _QUERIES, _TRIED

    @property
    def entries_at_once(self) -> int:
        return _ENTRIES_OF_QUERY if self.made.rows == 1 else _ENTRIES

    @property
    def blocks_at_once(self) -> int:
        return min(max(_FOUND_KEYS // self.made.keys, 1), 32)

    @property
    def most_queries(self) -> int:
        """A power of two that a block of queries does not exceed."""
        return block(self.made.rows)

    @property
    def may(self) -> str:
        """ "" where all blocks may have pairs that are kept."""
        return "" if self._of_kept.may == TRUE else scalar(self._of_kept.may)

    @property
    def sure(self) -> str:
        """ "" where nothing tells that of a block."""
        return "" if self._of_kept.sure == FALSE else scalar(self._of_kept.sure)

    @property
    def full(self) -> str:
        """ "" where nothing else excludes pairs."""
        return "" if self._of_kept.full == TRUE else scalar(self._of_kept.full)

    @property
    def _of_kept(self) -> KeptBlocks:
        assert self.kept is not None
        return self.kept

    @property
    def queries_of_line(self) -> str:
        return f"i_{self.made.row_axis}"

    @property
    def place_of_line(self) -> Iterator[str]:
        axes = [axis for axis in range(len(self.made.lines)) if axis != self.made.row_axis]
        yield from (f"{name} = i_{axis}" for name, axis in zip(("b", KV_HEAD.name), axes, strict=False))

    @staticmethod
    def no_end(end: Extreme) -> str:
        bits = 63 if end.is_wide else 31
        return str(-(2**bits) if end.is_most else 2**bits - 1)

    @staticmethod
    def type_of(end: Extreme) -> str:
        return "tl.int64" if end.is_wide else "tl.int32"

    @staticmethod
    def statement(item: Statement) -> str:
        return statement(item)

    @property
    def inverting_name(self) -> str:
        return f"{self.name}_columns"

    @property
    def sorting_name(self) -> str:
        return f"{self.name}_sorted_lists"

    # --- one list

    @property
    def entries(self) -> str:
        return scalar(self.made.extents[-1])

    @property
    def indices(self) -> Iterator[str]:
        axes = len(self.made.lines)
        if axes > 1:
            yield "rest = line"
        for axis in range(axes - 1, 0, -1):
            size = self._factor(self.made.lines[axis])
            yield f"i_{axis} = rest % {size}"
            yield f"rest = rest // {size}"
        if axes:
            yield f"i_0 = {'rest' if axes > 1 else 'line'}"

    def _at(self, tensor: str) -> str:
        terms = (f"i_{axis}.to(tl.int64) * stride_{tensor}_{axis}" for axis in range(len(self.made.lines)))
        return " + ".join(terms) or "0"

    @property
    def offset(self) -> str:
        return self._at(self.tensor)

    @property
    def count(self) -> str:
        match self.made.limit:
            case None:
                return self.entries
            case Load(tensor=tensor, indices=indices):
                at = self._at(tensor) if indices else "0"
                return f"tl.minimum(tl.load({tensor}_ptr + {at}), {self.entries}).to(tl.int32)"
            case limit:
                return f"tl.minimum({scalar(limit)}, {self.entries})"

    @property
    def length(self) -> str:
        return "found"

    @property
    def _inputs(self) -> Sequence[tuple[str, int]]:
        return self.made.inputs

    @property
    def line_of_row(self) -> str:
        axis, lines = self.made.row_axis, self.made.lines
        assert axis is not None
        rows = self._factor(lines[axis])
        if axis == len(lines) - 1:
            return f"group * {rows} + row"
        after = " * ".join(self._factor(size) for size in lines[axis + 1 :])
        return f"(group // ({after}) * {rows} + row) * ({after}) + group % ({after})"

    @property
    def line_count(self) -> str:
        return " * ".join(self._factor(size) for size in self.made.lines) or "1"

    def _factor(self, size: Expr) -> str:
        text = scalar(size)
        return text if text.isalnum() else f"({text})"

    # --- parameters and launches

    @property
    def sizes(self) -> list[str]:
        return [*super().sizes, *([LIST_ROWS.name] if self.inverts else [])]

    @property
    def finding_parameters(self) -> list[str]:
        return self._parameters("_list_bits_ptr")

    @property
    def listing_parameters(self) -> list[str]:
        if self.kept is not None:
            return ["_lists_ptr, _list_bits_ptr", BLOCKS.name]
        return self._parameters("_lists_ptr", "_list_bits_ptr")

    @property
    def sorting_parameters(self) -> list[str]:
        return self._parameters("_lists_ptr", "_marks_ptr")

    def _parameters(self, *own: str) -> list[str]:
        inputs = self._inputs
        pointers = ", ".join([*(f"{name}_ptr" for name, _ in inputs), *own])
        strides = [f"stride_{name}_{axis}" for name, rank in inputs for axis in range(rank)]
        return [pointers, ", ".join(strides), ", ".join(self.sizes)]

    @property
    def inverting_parameters(self) -> list[str]:
        return ["_list_bits_ptr, _columns_ptr", ", ".join(self.sizes)]

    @property
    def _groups(self) -> str:
        return show_product(self.made.groups)

    @property
    def lists_shape(self) -> str:
        return f"{self.lines} * ({show(self.made.extents[-1])} + 1)"

    @property
    def bits_shape(self) -> str:
        return f"{'2 * ' if self.kept is not None else ''}{self._words}"

    @property
    def _words(self) -> str:
        return f"{self.lines} * cdiv(list_blocks, 32)"

    @property
    def columns_shape(self) -> str:
        return f"{self._groups} * list_blocks * (list_rows + 1)"

    def launches(self, config: str = "") -> Iterator[CallText]:
        """Yields the launches of the kernels that make lists for a forward, or for a backward, which has
        configs.
        """
        inputs = [name for name, _ in self._inputs]
        if config and self.sorts:
            pointers = [*inputs, "_lists", "_marks"]
            yield triton_kernel(
                self.sorting_name, "sorting", pointers=pointers, config=config, warps=_SORTING_WARPS
            )
            return
        if self.kept is not None:
            words = f"max({self._words}, 1)"
            yield triton_kernel(
                self.finding_name,
                words,
                pointers=[*inputs, "_list_bits"],
                config=config,
                warps=_FINDING_WARPS,
            )
            inputs = []
        pointers = [*inputs, "_lists", "_list_bits"]
        grid = f"max({self.lines}, 1)"
        yield triton_kernel(self.listing_name, grid, pointers=pointers, config=config, warps=_WARPS)
        if config and self.inverts:
            grid = f"max({self._groups} * cdiv(list_blocks, {_COLUMNS}), 1)"
            pointers = ["_list_bits", "_columns"]
            yield triton_kernel(
                self.inverting_name, grid, pointers=pointers, config=config, warps=_INVERTING_WARPS
            )

    @property
    def sorting_sizes(self) -> Mapping[str, str]:
        programs = f"max(min({self.lines}, {_MARKS} // max(list_blocks, 1), {_MOST_SORTING}), 1)"
        return {"sorting": programs} if self.sorts else {}

    def sorting_memory(self) -> Iterator[CallText]:
        if self.sorts:
            yield declare_allocation("_marks", "i32[sorting * max(list_blocks, 1)]", zero=True)

    @property
    def memory(self) -> Mapping[str, str]:
        shapes = self.list_memory
        if self.inverts:
            shapes = {**shapes, "_list_bits": self.bits_shape, "_columns": self.columns_shape}
        return {name: f"max({shape}, 1)" for name, shape in shapes.items()}

    @property
    def list_memory(self) -> dict[str, str]:
        bits = {} if self.kept is None else {"_list_bits": self.bits_shape}
        return {"_lists": self.lists_shape, **bits}
