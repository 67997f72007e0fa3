"""Text of tiles of k and v that are copied as they lie in memory, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from attnc.expr.nodes import Call
from attnc.plan.ir import Fetch, Row
from attnc.plan.ir.kernel import KEY_ROW, REST
from attnc.plan.sm90.narrow import Narrow, NarrowPart, exponent_of
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
    is_power: scales are powers of two; exponent: the byte, above 127, that such a scale is made of.
    """

    scale: str = ""
    of_row: tuple[Loaded, ...] = ()
    of_block: tuple[Loaded, ...] = ()
    is_power: bool = False
    exponent: str = ""

    @property
    def stored(self) -> str:
        return str(self.dtype) if self.is_converted else "element"

    @property
    def together(self) -> tuple[Loaded, ...]:
        return tuple(loaded for loaded in self.of_block if loaded.axis)

    @property
    def apart(self) -> tuple[Loaded, ...]:
        return tuple(loaded for loaded in self.of_block or self.of_row if not loaded.axis)


class NarrowTiles:
    """Those of a kernel. parts: the tensors; scaled: those whose columns have scales; wide: the one of k and
    v that comes in 16 bits beside the other, or ""; joined: loads of the columns behind those of k.
    """

    def __init__(self, text: CudaText, planned: Narrow) -> None:
        self.parts = [_with_scale(part, text) for part in planned.parts]
        self.scaled = [part for part in self.parts if part.scale]
        behind = (scale.fetches for scale in text.kernel.step.scales if scale.tensor == REST)
        self.joined = [_load(fetch, text) for fetch in next(behind, ())]
        self.wide = "" if text.layout.v_in_k else "".join({"k", "v"}.difference(planned.tensors))

    @property
    def asks_ahead(self) -> bool:
        """Whether warps that convert by way of registers ask for rows a tile before they load them. Beside
        scales that are powers of two ptxas has no registers left for that, and spills.
        """
        return not any(part.is_power for part in self.parts)


def _with_scale(part: NarrowPart, text: CudaText) -> NarrowTile:
    tile = NarrowTile(**{field.name: getattr(part, field.name) for field in fields(part)})
    found = next((scale for scale in text.kernel.step.scales if scale.tensor == part.name), None)
    if found is None:
        return tile
    loads = {fetch: _load(fetch, text, tile) for fetch in found.fetches}
    of_row = tuple(x for fetch, x in loads.items() if fetch.axes == KEY_ROW.axes and x.type == "int")
    return replace(
        tile,
        scale=scalar(found.value),
        exponent=exponent_of(found.value),
        of_row=of_row,
        of_block=tuple(x for x in loads.values() if x not in of_row),
        is_power=isinstance(found.value, Call) and found.value.function == "exp2",
    )


def _load(fetch: Fetch, text: CudaText, tile: NarrowTile | None = None) -> Loaded:
    at = Row(name=f"{fetch.name}_line", tensor=fetch.load.tensor, indices=fetch.load.indices)
    dtype = text.dtypes[fetch.load.tensor]
    value, line = (statement(x, text.dtypes, text.kernel.dims, scalar) for x in (fetch, at))
    found = len(fetch.load.indices) - 1 if tile is None else tile.find_neighbours(fetch, dtype)
    axis = "" if found is None else f"{fetch.load.tensor}_{found}"
    return Loaded(fetch.name, value_type(fetch, dtype), value, line, scalar(fetch.guard), STORED[dtype], axis)
