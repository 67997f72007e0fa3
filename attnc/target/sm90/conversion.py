"""What `templates/sm90/_convert.cu.jinja` prints: the kernel that converts keys and values before the one
that multiplies them; and the declaration of its launch and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.plan.conversion import (
    CONVERT_BLOCKS,
    CONVERT_CHUNK,
    CONVERT_THREADS,
    count_alike,
    group_rows,
    list_sizes,
)
from attnc.plan.ir import Module
from attnc.plan.ir.module import Converted
from attnc.plan.lists import KV_HEAD
from attnc.plan.signature import feature
from attnc.target.declaration import CallText, copies_of, show_size, tensor
from attnc.target.sm80.launches import cuda_kernel
from attnc.target.sm80.printer import scalar, statement, stored_type

#: What the number of a row along an axis is called.
_INDICES = {Role.BATCH: "b", Role.KEY: "n", Role.HEAD: KV_HEAD.name}


class RowAxis(NamedTuple):
    """An axis of rows. name: of an index; size: of the axis, in the kernel; place: the index in
    memory, which pages make another one; stride: its name.
    """

    name: str
    size: str
    place: str
    stride: str


class ConvertedText:
    """A tensor that is converted. name: "k" or "v"; columns: of a row; made: what declarations call the
    result; table, page: of rows in pages; ends: of packed sequences; scale: of the column at hand, is_alike:
    whether columns that a thread loads together have one; read: sizes that it mentions.
    """

    def __init__(self, module: Module, converted: Converted, dtypes: dict[str, DType]) -> None:
        self._converted, self._dtypes = converted, dtypes
        tensor, scale = converted.stored.tensor, converted.scale
        storage = tensor.storage
        self.name, self.columns, self.made = tensor.name, feature(tensor), copies_of(module)[tensor.name]
        self.stored = stored_type(DType(tensor.dtype), module.variant)
        self.sizes = [show_size(bind) for bind in converted.made.axes[:-1]]
        self.table, self.page = storage.table, storage.rows_of_page
        self.ends = storage.ends if storage.is_packed else ""
        self.scale = "" if scale is None else scalar(scale.value)
        self.is_alike = scale is not None and count_alike(scale) % CONVERT_CHUNK == 0
        self.read = [] if scale is None else list_sizes(scale.value, scale.fetches)
        self.declared_strides = [name for name in converted.stored.strides if name]
        self.strides = [name.replace("stride_", "stride_stored_", 1) for name in self.declared_strides]

    @property
    def axes(self) -> list[RowAxis]:
        indices = [_INDICES[role] for role in self._converted.stored.tensor.roles[:-1]]
        in_pages = {"b": "page", "n": f"n % {self.page}"} if self.page else {}
        places = [in_pages.get(index, index) for index in indices]
        sizes = [f"args.{size}" if size.isidentifier() else size for size in self.sizes]
        return [RowAxis(*axis) for axis in zip(indices, sizes, places, self.strides, strict=True)]

    @property
    def dims(self) -> list[str]:
        """The sizes of a call that its rows are counted by, and a scale reads."""
        sequences = ["B"] if self.ends and self.scale else []
        return [name for name in (*self.sizes, *sequences, *self.read) if name.isidentifier()]

    @property
    def scale_values(self) -> Iterator[str]:
        found = self._converted.scale
        for fetch in () if found is None else found.fetches:
            yield statement(fetch, self._dtypes, (), scalar)

    @property
    def declared(self) -> CallText:
        made = self._converted.made
        strides = (name.replace(f"stride_{self.name}", f"stride_{self.made}") for name in made.strides)
        return tensor(replace(made, tensor=replace(made.tensor, name=self.made), strides=tuple(strides)))


class ConversionText:
    """Text of the kernel. groups: tensors by how their rows lie; length: of the keys of a sequence that are
    converted, "": all; length_sizes, length_values: sizes that it mentions, and statements that load it.
    warps: of all configs, where those of the kernel that follows decide how its text is compiled; 0: others.
    """

    def __init__(self, module: Module, dtypes: dict[str, DType], *, warps: int = 0) -> None:
        planned = module.conversion
        assert planned is not None
        self.name = f"{module.variant.attention.name}_convert"
        self.threads = 32 * warps or CONVERT_THREADS
        self._own = {} if warps else {"WARPS": str(CONVERT_THREADS // 32)}
        self.groups = [
            (rows, [ConvertedText(module, made, dtypes) for made in rows.tensors])
            for rows in group_rows(planned)
        ]
        self.parts = [part for _, parts in self.groups for part in parts]
        self.length = "" if planned.length is None else scalar(planned.length)
        self.length_sizes = [] if planned.length is None else list_sizes(planned.length, planned.fetches)
        self.length_values = [statement(fetch, dtypes, (), scalar) for fetch in planned.fetches]

    @property
    def dims(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts for name in (*part.dims, *self.length_sizes)))

    @property
    def pointers(self) -> list[str]:
        forms = ("const {0.stored}* stored_{0.name}_ptr;", "element* made_{0.name}_ptr;")
        return [form.format(part) for part in self.parts for form in forms]

    @property
    def launch(self) -> CallText:
        counts = (f"{' * '.join(parts[0].sizes)} * {rows.pieces}" for rows, parts in self.groups)
        chunks = list(dict.fromkeys(counts))
        most = f"max({', '.join(chunks)})" if len(chunks) > 1 else chunks[0]
        blocks = f"min(cdiv({most}, {self.threads}), {CONVERT_BLOCKS} * multiprocessors())"
        return cuda_kernel(self.name, blocks, changes={**self._own, "shared": "0"})
