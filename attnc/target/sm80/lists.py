"""The kernel that makes lists ready for a walk: what `templates/cuda/_lists.cu.jinja` prints, which makes
blocks into bits, and `templates/sm90/_list_keys.cu.jinja`, which brings keys into order; and the declaration
of its launch and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnc.expr.construct import ONE, add
from attnc.expr.nodes import Expr, Load, Or, show
from attnc.model.dtypes import DType
from attnc.plan.ir import Module, Statement
from attnc.plan.ir.list_making import Extreme, ListMaking
from attnc.plan.lists import BLOCKS, KV_HEAD, LIST_ROWS
from attnc.target.declaration import CallText, show_product
from attnc.target.lists import Lists
from attnc.target.sm80.launches import cuda_kernel, cuda_kernels
from attnc.target.sm80.printer import STORED, local, scalar, sizes_of_call, statement, stored_type

#: Threads of a block, which reads a list; words of bits that each has of keys that are brought into order.
LIST_THREADS, LIST_WORDS = 128, 8
#: The same words where each has bytes of four keys, whose bits are queries.
UNION_WORDS = 32


class CudaListsText(Lists):
    """Text of the kernel. made: what of; dtypes: of the module's tensors; inverts: it sets bits of blocks of
    queries too, for a backward; threads: of a block, by default a number of its own. Where lists are of
    single keys, it brings those into order (`by_entry`).
    """

    stop = f"args.{BLOCKS.name}"

    def __init__(
        self,
        module: Module,
        made: ListMaking,
        dtypes: Mapping[str, DType],
        *,
        inverts: bool = False,
        threads: str = str(LIST_THREADS),
    ) -> None:
        self.made, self.tensor = made, made.tensor
        self.name = f"{module.variant.attention.name}_{'backward_' if inverts else ''}lists"
        self.threads, self.inverts, self.by_entry = threads, inverts, made.by_entry
        self.words = UNION_WORDS if self.queries > 1 else LIST_WORDS
        self._dtypes, self._variant = dtypes, module.variant
        own = not module.variant.element_param
        self.element = STORED[module.variant.attention.element] if own else ""
        self.entry = "" if made.kept else stored_type(dtypes[made.tensor], module.variant)
        self.kept = made.kept

    def print_scalar(self, expr: Expr) -> str:
        return scalar(expr)

    @property
    def by_row(self) -> bool:
        return False

    @property
    def queries(self) -> int:
        return self.made.queries

    @property
    def unites(self) -> str:
        """What queries of a tile list together: "blocks", as bits, or "keys"; "" where it has one query."""
        return "" if self.queries == 1 else "keys" if self.by_entry else "blocks"

    @property
    def piece(self) -> int:
        """Keys of a block that surely have one word of bits, 0 where a list names keys."""
        return 0

    @property
    def found(self) -> str:
        return "found"

    @property
    def end(self) -> str:
        return "list_length"

    @property
    def pages(self) -> list[str]:
        return []

    @property
    def page_rows(self) -> str:
        return ""

    @property
    def most(self) -> Expr:
        return self.made.extents[-1]

    @property
    def stride(self) -> Expr:
        return add(self.most, ONE)

    @property
    def indices(self) -> Iterator[str]:
        rest = "line"
        for axis in range(len(self.made.lines) - 1, 0, -1):
            size = self._size(self.made.lines[axis])
            yield f"const int i_{axis} = {rest} % {size}, rest_{axis} = {rest} / {size};"
            rest = f"rest_{axis}"
        if self.made.lines:
            yield f"const int i_0 = {rest};"

    def _size(self, size: Expr) -> str:
        text = scalar(size)
        return f"args.{text}" if text.isidentifier() else text if text.isdigit() else f"({text})"

    def _at(self, tensor: str) -> str:
        axes = range(len(self.made.lines))
        return "".join(f" + i_{axis} * args.stride_{tensor}_{axis}" for axis in axes)

    @property
    def offset(self) -> str:
        return self._at(self.tensor)

    @property
    def count(self) -> str:
        most = self._size(self.made.extents[-1])
        match self.made.limit:
            case None:
                return most
            case Load(tensor=tensor, indices=indices):
                at = self._at(tensor) if indices else ""
                read = f"*(args.{tensor}_ptr{at})"
                return f"{read} < {most} ? (int){read} : {most}"
            case limit:
                return f"min({scalar(limit)}, {most})"

    @property
    def row(self) -> str:
        return f"i_{self.made.row_axis}"

    @property
    def sizes_of_mask(self) -> Iterator[str]:
        yield from sizes_of_call(name for name in self.made.dims if name not in self._shortened)
        yield from sizes_of_call((name for name in self.made.dims if name in self._shortened), "int")

    @property
    def _shortened(self) -> set[str]:
        assert self.kept is not None
        return {item.name for item in self.kept.program} & {"M", "N"}

    @property
    def place_of_line(self) -> Iterator[str]:
        assert self.kept is not None
        axes = [axis for axis in range(len(self.made.lines)) if axis != self.made.row_axis]
        places = {name: f"i_{axis}" for name, axis in zip(("b", KV_HEAD.name), axes, strict=False)}
        yield local("const int", places)
        sizes = tuple(self._shortened)
        yield from (statement(item, dict(self._dtypes), sizes, scalar) for item in self.kept.program)

    @staticmethod
    def no_end(end: Extreme) -> str:
        most = "0x7fffffffffffffffLL" if end.is_wide else "0x7fffffff"
        return f"{_type_of(end)} {end.name} = {f'-{most} - 1' if end.is_most else most};"

    def widen(self, end: Extreme) -> str:
        """Prints how a value changes the least, or the most, of those before it."""
        return _join(end, f"({_type_of(end)})({self.print_scalar(end.value)})")

    @staticmethod
    def over_warp(end: Extreme) -> str:
        if end.is_wide:
            return f"{end.name} = {'most' if end.is_most else 'least'}_of_warp({end.name});"
        return f"{end.name} = warp_{'max' if end.is_most else 'min'}({end.name});"

    @property
    def kept_ends(self) -> Iterator[str]:
        yield from (f"{place.format('warp')} = {end.name};" for end, place in self._places)

    @property
    def joined_ends(self) -> Iterator[str]:
        yield from (_join(end, f"({_type_of(end)}){place.format('other')}") for end, place in self._places)

    @property
    def _places(self) -> Iterator[tuple[Extreme, str]]:
        assert self.kept is not None
        found = self.kept.ends_of("q")
        yield from ((end, f"ends[{len(found)} * {{}} + {i}]") for i, end in enumerate(found))

    @property
    def full(self) -> str:
        """What stands behind `&&`."""
        assert self.kept is not None
        text = scalar(self.kept.full)
        return f"({text})" if isinstance(self.kept.full, Or) else text

    def statement(self, item: Statement) -> str:
        return statement(item, dict(self._dtypes), (), scalar)

    @property
    def group(self) -> str:
        text = "0ll"
        for axis, size in enumerate(self.made.lines):
            if axis != self.made.row_axis:
                text = f"i_{axis}" if text == "0ll" else f"({text} * {self._size(size)} + i_{axis})"
        return text if text == "0ll" else f"(long long){text}"

    @property
    def _inputs(self) -> list[str]:
        return [name for name, _ in self.made.inputs]

    @property
    def _strides(self) -> list[list[str]]:
        return [[f"stride_{name}_{axis}" for axis in range(rank)] for name, rank in self.made.inputs]

    @property
    def _sizes(self) -> list[str]:
        return [*self.made.dims, BLOCKS.name, LIST_ROWS.name]

    @property
    def fields(self) -> Iterator[str]:
        for name in self._inputs:
            yield f"const {stored_type(self._dtypes[name], self._variant)}* {name}_ptr;"
        yield "int* _list_bits_ptr;"
        yield "int* _row_bits_ptr;"
        for strides in self._strides:
            if strides:
                yield f"long long {', '.join(strides)};"
        yield f"int {', '.join(self._sizes)};"

    def own_launch(self, config: str) -> CallText:
        """Returns the launch of the kernel with arguments of its own. config: of a kernel of the backward."""
        own = {"WARPS": str(LIST_THREADS // 32), "STAGES": "1", "shared": self._shared}
        kernel = cuda_kernel(self.name, self._blocks, config=config, changes=own)
        addresses = [*self._inputs, "_list_bits", "_row_bits"]
        return cuda_kernels([kernel], addresses, self._strides, self._sizes, {})

    @property
    def allocations(self) -> Mapping[str, str]:
        of_rows = f"{show_product(self.made.groups)} * list_blocks * cdiv(list_rows, 32)"
        return {"_list_bits": self.memory, "_row_bits": f"{self._words_each}{of_rows}"}

    @property
    def result(self) -> str:
        return "_lists" if self.by_entry else "_list_bits"

    @property
    def memory(self) -> str:
        if self.by_entry:
            return f"{self.lines} * ({show(self.stride)})"
        return f"{self._words_each}{self._words}"

    @property
    def _words(self) -> str:
        return f"{self.lines} * cdiv(list_blocks, 32)"

    @property
    def _words_each(self) -> str:
        """How many words there are for 32 blocks, as a factor: bits of full blocks stand beside others."""
        return "2 * " if self.kept is not None else ""

    @property
    def entries(self) -> str:
        return self._size(self.most)

    @property
    def list_stride(self) -> str:
        return scalar(self.stride)

    @property
    def launch(self) -> CallText:
        if self.by_entry:  # as many threads as the kernel that reads the lists
            shared = f"config.WARPS * {128 * self.words + 4}"
            return cuda_kernel(self.name, self.lines, changes={"shared": shared})
        own = {"WARPS": str(LIST_THREADS // 32)} if self.threads.isdigit() else {}
        return cuda_kernel(self.name, self._blocks, changes={**own, "shared": self._shared})

    @property
    def _shared(self) -> str:
        """Bytes of shared memory: two words of bits, where those are found, and ends of each warp."""
        if self.kept is None:
            return "0"
        return str(8 + 8 * (LIST_THREADS // 32) * len(self.kept.ends_of("q")))

    @property
    def _blocks(self) -> str:
        return self.lines if self.kept is None else self._words


def _type_of(end: Extreme) -> str:
    return "long long" if end.is_wide else "int"


def _join(end: Extreme, value: str) -> str:
    return f"{end.name} = {'max' if end.is_most else 'min'}({end.name}, {value});"
