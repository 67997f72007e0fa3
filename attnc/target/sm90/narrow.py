"""Text of tiles of 8 bits: their places in shared memory, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from attnc.expr.nodes import Call
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.plan.ir import Fetch, Row, Statement
from attnc.plan.ir.kernel import KEY_ROW
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.narrow import PIECE_OF_BYTES, Narrow, cut_columns, pieces_of_bytes
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm80.printer import scalar, statement, value_type


class Loaded(NamedTuple):
    """A value that is loaded. type: in C++; statement: its declaration; line: that of its address; guard:
    when there is one.
    """

    name: str
    type: str
    statement: str
    line: str
    guard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowPart:
    """A tensor that is copied as it lies in memory. name: "k" or "v"; stored: its type, as
    `sm90_convert.cuh` calls it; number: among those that are; panels: of 128 bytes of a row of a tile; width:
    columns of one; bytes: of a row in memory. scale: of a block of columns of a row, "" where there is none;
    of_row, of_block: what it is made of, loaded for a row, such as its page, and for a block; block, scales:
    columns of a block, blocks of a row; is_power: scales are powers of two.
    """

    name: str
    stored: str
    number: int
    panels: int
    width: int
    bytes: int
    scale: str = ""
    of_row: tuple[Loaded, ...] = ()
    of_block: tuple[Loaded, ...] = ()
    block: int = 0
    scales: int = 0
    is_power: bool = False

    @property
    def letter(self) -> str:
        return self.name.upper()

    @property
    def kept(self) -> tuple[Loaded, ...]:
        """What lanes keep of a scale until it is computed."""
        return self.of_block or self.of_row

    @property
    def is_converted(self) -> bool:
        return self.stored != "element"


class NarrowTiles:
    """Tiles of 8 bits of a kernel. parts: the tensors that are converted; scaled: those whose columns have
    scales; wide: the one of k and v that comes in 16 bits beside the other, or "".
    """

    def __init__(self, text: CudaText, tensors: Narrow) -> None:
        self._text = text
        plain = narrow_parts(tensors, text.layout, text.module.variant.attention)
        self.parts = tuple(_with_scale(part, text) for part in plain)
        self.scaled = [part for part in self.parts if part.scale]
        converted = [part.name for part in self.parts]
        self.wide = "" if text.layout.v_in_k or len(converted) != 1 else "k" if converted == ["v"] else "v"
        self.converts = any(part.is_converted for part in self.parts)

    def byte_pool(self, name: str) -> str:
        """Returns where rows of K or V of the head at hand lie, in bytes."""
        text, tensor = self._text, self._text.view.rows(name).tensor
        strides = f"args.stride_{tensor}p, args.stride_{tensor}n"
        return f"byte_pool(args.{tensor}_ptr + {text.rows.offset(name)}, {strides})"


def _with_scale(part: NarrowPart, text: CudaText) -> NarrowPart:
    """Returns the part with the scale of its columns, if it has one."""
    found = next((scale for scale in text.kernel.step.scales if scale.tensor == part.name), None)
    if found is None:
        return part
    of_row: list[Loaded] = []
    of_block: list[Loaded] = []
    for fetch in found.fetches:
        made = _load(fetch, text)
        (of_row if fetch.axes == KEY_ROW.axes and made.type == "int" else of_block).append(made)
    block, scales = cut_columns(text.module.variant.attention, part.name)
    return replace(
        part,
        scale=scalar(found.value),
        of_row=tuple(of_row),
        of_block=tuple(of_block),
        block=block,
        scales=scales,
        is_power=isinstance(found.value, Call) and found.value.function == "exp2",
    )


def _load(fetch: Fetch, text: CudaText) -> Loaded:
    def declare(item: Statement) -> str:
        return statement(item, text.dtypes, text.kernel.dims, scalar)

    at = Row(name=f"{fetch.name}_line", tensor=fetch.load.tensor, indices=fetch.load.indices)
    kind = value_type(fetch, text.dtypes[fetch.load.tensor])
    return Loaded(fetch.name, kind, declare(fetch), declare(at), scalar(fetch.guard))


def narrow_parts(narrow: Narrow, layout: CudaLayout, attention: Attention) -> tuple[NarrowPart, ...]:
    """Returns the tensors of k and v that are converted, in the order in which they lie in shared memory."""
    columns = {"k": layout.d, "v": layout.dv}
    dtypes = {"k": DType(attention.k.dtype), "v": DType(attention.v.dtype)}
    return tuple(
        NarrowPart(
            name=name,
            stored=str(dtypes[name]) if dtypes[name].is_narrow else "element",
            number=number,
            panels=pieces_of_bytes(columns[name] * dtypes[name].bytes),
            width=PIECE_OF_BYTES // dtypes[name].bytes,
            bytes=columns[name] * dtypes[name].bytes,
        )
        for number, name in enumerate(narrow.tensors)
    )
