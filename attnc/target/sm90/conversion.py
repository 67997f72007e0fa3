"""Text of the kernel that converts keys and values before the one that multiplies them: what
`templates/sm90/_convert.cu.jinja` prints, and the declaration of its launch and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd

from attnc.expr.nodes import Dim, Expr, walk
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Role
from attnc.plan.conversion import count_alike
from attnc.plan.ir import Fetch, Module, statement_expressions
from attnc.plan.ir.kernel import KEY_ROW
from attnc.plan.ir.module import Converted
from attnc.plan.lists import KV_HEAD
from attnc.plan.signature import feature
from attnc.target.declaration import CallText, show_size, tensor
from attnc.target.sm80.printer import local, scalar, sizes_of_call, statement, stored_type

#: Threads of a block, blocks for each multiprocessor, columns that a thread loads together, and the most that
#: it converts at a time.
CONVERT_THREADS, _BLOCKS, _CHUNK, COLUMNS_AT_ONCE = 256, 8, 8, 16
#: What the number of a row along an axis is called.
_INDICES = {Role.BATCH: "b", Role.KEY: "n", Role.HEAD: KV_HEAD.name}


class ConvertedText:
    """A tensor that is converted. name: "k" or "v"; columns: of a row; made: what declarations call the
    result.
    """

    def __init__(self, module: Module, converted: Converted, dtypes: dict[str, DType]) -> None:
        assert module.conversion is not None
        self._conversion, self._converted, self._dtypes = module.conversion, converted, dtypes
        self._tensor = converted.stored.tensor
        self.name, self.columns = self._tensor.name, feature(self._tensor)
        self.stored = stored_type(DType(self._tensor.dtype), module.variant)
        self.made = f"_{self.name}"
        self._sizes = [show_size(bind) for bind in converted.made.axes[:-1]]
        self._roles = self._tensor.roles[:-1]

    @property
    def dims(self) -> list[str]:
        """The sizes of a call that its rows are counted by."""
        sequences = ["B"] if self._tensor.storage.is_packed and self.scale else []
        made = self._conversion
        of_length = () if made.length is None else _list_sizes(made.length, made.fetches)
        names = (*self._sizes, *sequences, *self._read, *of_length)
        return [name for name in names if name.isidentifier()]

    @property
    def _read(self) -> list[str]:
        """The sizes that a scale mentions."""
        found = self._converted.scale
        return [] if found is None else list(_list_sizes(found.value, found.fetches))

    @property
    def skips(self) -> list[str]:
        """Statements that leave out rows behind the keys of a sequence."""
        made = self._conversion
        if made.length is None:
            return []
        return [
            *sizes_of_call(_list_sizes(made.length, made.fetches)),
            *(statement(fetch, self._dtypes, (), scalar) for fetch in made.fetches),
            f"if (n >= {scalar(made.length)})",
            "    continue;",
        ]

    @property
    def lines(self) -> str:
        """How many rows it has, as a size."""
        return " * ".join(self._sizes)

    @property
    def all_lines(self) -> str:
        """The same in the kernel, in 64 bits."""
        return " * ".join(["1ll", *map(_of_call, self._sizes)])

    @property
    def indices(self) -> Iterator[str]:
        """Statements that take the number of a row apart: from the last axis to the first."""
        rest = "line"
        last = len(self._roles) - 1
        for axis in range(last, 0, -1):
            size = _of_call(self._sizes[axis])
            name, after = _INDICES[self._roles[axis]], f"rest_{axis}"
            yield f"const int {name} = {rest} % {size};"
            yield f"const long long {after} = {rest} / {size};"
            rest = after
        yield f"const int {_INDICES[self._roles[0]]} = {rest};"

    @property
    def place(self) -> str:
        """The address of the first of some columns of a row."""
        indices = {**_INDICES}
        if page := self._tensor.storage.rows_of_page:
            indices |= {Role.BATCH: "page", Role.KEY: f"n % {page}"}
        places = zip((indices[role] for role in self._roles), self._letters, strict=True)
        terms = [f"{index} * args.{self.stride(letter)}" for index, letter in places]
        return f"args.stored_{self.name}_ptr + {' + '.join(terms)} + column_lo"

    @property
    def page(self) -> list[str]:
        """Statements that look up the page of a row."""
        match self._tensor.storage:
            case Paged(block_table=table, page=page):
                entry = f"args.{table}_ptr[b * args.stride_{table}_0 + n / {page} * args.stride_{table}_1]"
                return [f"const int page = {entry};"]
            case _:
                return []

    def stride(self, letter: str) -> str:
        return f"stride_stored_{self.name}{letter}"

    @property
    def _letters(self) -> list[str]:
        return [name.removeprefix(f"stride_{self.name}") for name in self._converted.stored.strides if name]

    @property
    def pointers(self) -> list[str]:
        return [f"const {self.stored}* stored_{self.name}_ptr;", f"element* made_{self.name}_ptr;"]

    @property
    def strides(self) -> list[str]:
        return [self.stride(letter) for letter in self._letters]

    @property
    def declared_strides(self) -> list[str]:
        return [name for name in self._converted.stored.strides if name]

    @property
    def declared(self) -> CallText:
        """The declaration of the result."""
        made = self._converted.made
        strides = (name.replace(f"stride_{self.name}", f"stride_{self.made}") for name in made.strides)
        return tensor(replace(made, tensor=replace(made.tensor, name=self.made), strides=tuple(strides)))

    # -- scales --------------------------------------------------------------------------------------------

    @property
    def scale(self) -> str:
        found = self._converted.scale
        return "" if found is None else scalar(found.value)

    @property
    def is_alike(self) -> bool:
        """Whether the columns that a thread loads together have one scale."""
        found = self._converted.scale
        return found is not None and count_alike(found) % _CHUNK == 0

    @property
    def scale_values(self) -> Iterator[str]:
        """Statements that load what the scale of a column is made of."""
        found = self._converted.scale
        for fetch in () if found is None else found.fetches:
            yield statement(fetch, self._dtypes, (), scalar)

    @property
    def places(self) -> Iterator[str]:
        """Where a row is, as scales are found by it."""
        cu = self._tensor.storage.ends if self._tensor.storage.is_packed else ""
        key = "n"
        if cu:
            found = f"upper_bound(args.{cu}_ptr, args.stride_{cu}_0, args.B + 1, n)"
            yield local("const int", b=f"min({found}, args.B) - 1")  # of rows behind them all, the last
            key = f"n - (int)args.{cu}_ptr[b * args.stride_{cu}_0]"
        yield from sizes_of_call(self._read)
        yield local("const int", {KEY_ROW.name: key, "h": KV_HEAD.name})


def _list_sizes(value: Expr, fetches: Iterable[Fetch]) -> Iterator[str]:
    exprs = [value, *(x for fetch in fetches for x in statement_expressions(fetch))]
    return (node.name for expr in exprs for node in walk(expr) if isinstance(node, Dim))


def _of_call(size: str) -> str:
    return f"args.{size}" if size.isidentifier() else size


@dataclass(frozen=True, slots=True)
class ConvertedGroup:
    """Tensors whose rows lie alike, and whose numbers are loaded together."""

    parts: tuple[ConvertedText, ...]

    @property
    def first(self) -> ConvertedText:
        return self.parts[0]

    @property
    def at_once(self) -> int:
        """Columns that a thread converts at a time."""
        return gcd(self.first.columns, COLUMNS_AT_ONCE)

    @property
    def chunks(self) -> int:
        return self.at_once // _CHUNK

    @property
    def pieces(self) -> int:
        """Threads for a row."""
        return self.first.columns // self.at_once


class ConversionText:
    """Text of the kernel. dtypes: of the tensors of the module."""

    def __init__(self, module: Module, dtypes: dict[str, DType]) -> None:
        assert module.conversion is not None
        self.name = f"{module.variant.attention.name}_convert"
        self.threads = CONVERT_THREADS
        self.parts = [ConvertedText(module, made, dtypes) for made in module.conversion.tensors]
        alike = groupby(self.parts, lambda part: (part.lines, part.columns, list(part.indices), part.page))
        self.groups = [ConvertedGroup(tuple(parts)) for _, parts in alike]

    @property
    def scales(self) -> bool:
        return any(part.scale for part in self.parts)

    @property
    def pointers(self) -> list[str]:
        return [pointer for part in self.parts for pointer in part.pointers]

    @property
    def strides(self) -> list[list[str]]:
        return [part.strides for part in self.parts]

    @property
    def dims(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part.dims))

    @property
    def launch(self) -> CallText:
        from attnc.target.sm80.declaration import cuda_kernel

        chunks = (f"{group.first.lines} * {group.pieces}" for group in self.groups)
        most = ", ".join(dict.fromkeys(chunks))
        most = f"max({most})" if "," in most else most
        blocks = f"min(cdiv({most}, {CONVERT_THREADS}), {_BLOCKS} * multiprocessors())"
        own = {"WARPS": str(CONVERT_THREADS // 32), "shared": "0"}
        return cuda_kernel(self.name, blocks, changes=own)
