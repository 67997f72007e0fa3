"""Text of tiles of k and v that are copied as they lie in memory, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from attnc.expr.nodes import Call, Const
from attnc.plan.columns import REST
from attnc.plan.ir import Fetch, Row
from attnc.plan.ir.kernel import KEY_ROW
from attnc.plan.sm90.narrow import Narrow, NarrowPart
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm80.printer import STORED, scalar, statement, value_type


class Loaded(NamedTuple):
    """A value that is loaded. type: in C++; statement: its declaration; line: that of its address; guard:
    when there is one; stored: its type in memory; axis: the name of the axis along which those of a row
    are neighbours, "" where none is known.
    """

    name: str
    type: str
    statement: str
    line: str
    guard: str
    stored: str
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowTile(NarrowPart):
    """A tensor that is copied as it lies in memory, as text. scale: of a block of columns of a row, "" where
    there is none; of_row, of_block: what it is made of, loaded for a row, such as its page, and for a block;
    is_power: scales are powers of two.
    """

    scale: str = ""
    of_row: tuple[Loaded, ...] = ()
    of_block: tuple[Loaded, ...] = ()
    is_power: bool = False

    @property
    def stored(self) -> str:
        return str(self.dtype) if self.is_converted else "element"

    @property
    def together(self) -> tuple[Loaded, ...]:
        """What a lane loads for all blocks of a row at once."""
        return tuple(loaded for loaded in self.of_block if loaded.axis)

    @property
    def apart(self) -> tuple[Loaded, ...]:
        """What a lane keeps of each block, one after the other."""
        return tuple(loaded for loaded in self.of_block or self.of_row if not loaded.axis)


class NarrowTiles:
    """Those of a kernel. parts: the tensors; scaled: those whose columns have scales; wide: the one of k and
    v that comes in 16 bits beside the other, or ""; joined: the columns of keys behind those of k.
    """

    def __init__(self, text: CudaText, planned: Narrow) -> None:
        self.parts = [_with_scale(part, text) for part in planned.parts]
        self.scaled = [part for part in self.parts if part.scale]
        self.joined = _join(text)
        others = {"k", "v"}.difference(planned.tensors)
        self.wide = "" if text.layout.v_in_k else "".join(others)


def _with_scale(part: NarrowPart, text: CudaText) -> NarrowTile:
    tile = NarrowTile(**{field.name: getattr(part, field.name) for field in fields(part)})
    found = next((scale for scale in text.kernel.step.scales if scale.tensor == part.name), None)
    if found is None:
        return tile
    of_row: list[Loaded] = []
    of_block: list[Loaded] = []
    for fetch in found.fetches:
        dtype = text.dtypes[fetch.load.tensor]
        made = _load(fetch, text, axis=tile.find_neighbours(fetch, dtype))
        (of_row if fetch.axes == KEY_ROW.axes and made.type == "int" else of_block).append(made)
    return replace(
        tile,
        scale=scalar(found.value),
        of_row=tuple(of_row),
        of_block=tuple(of_block),
        is_power=isinstance(found.value, Call) and found.value.function == "exp2",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTile:
    """Columns of keys that are of another input, as text. columns: how many; of_row: what is loaded to find a
    row; row: the load of its first column; tensor: the input; strides: of its other axes.
    """

    columns: int
    of_row: tuple[Loaded, ...]
    row: Loaded
    tensor: str
    strides: tuple[str, ...]


def _join(text: CudaText) -> JoinedTile | None:
    found = next((scale for scale in text.kernel.step.scales if scale.tensor == REST), None)
    if found is None:
        return None
    *others, load = found.fetches
    columns = load.load.extents[-1]
    assert isinstance(columns, Const), "a number, once params are fixed"
    tensor, axis = load.load.tensor, len(load.load.indices) - 1
    return JoinedTile(
        columns=int(columns.value),
        of_row=tuple(_load(fetch, text) for fetch in others),
        row=_load(load, text, axis=axis),
        tensor=tensor,
        strides=tuple(f"args.stride_{tensor}_{i}" for i in range(axis)),
    )


def _load(fetch: Fetch, text: CudaText, *, axis: int | None = None) -> Loaded:
    at = Row(name=f"{fetch.name}_line", tensor=fetch.load.tensor, indices=fetch.load.indices)
    dtype = text.dtypes[fetch.load.tensor]
    value, line = (statement(x, text.dtypes, text.kernel.dims, scalar) for x in (fetch, at))
    along = "" if axis is None else f"{fetch.load.tensor}_{axis}"
    return Loaded(
        fetch.name, value_type(fetch, dtype), value, line, scalar(fetch.guard), STORED[dtype], along
    )
