"""Text of tiles of 8 bits: their places in shared memory, and what becomes of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from attnc.model.attention import Attention
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.narrow import Narrow, pieces_of_bytes
from attnc.target.sm80.kernel import CudaText


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowPart:
    """A tensor that is converted. name: "k" or "v"; stored: its type, as `sm90_convert.cuh` calls it; number:
    among those that are; panels: of 128 columns of a tile; columns: of a row in memory.
    """

    name: str
    stored: str
    number: int
    panels: int
    columns: int

    @property
    def letter(self) -> str:
        return self.name.upper()


class NarrowText(CudaText):
    """Attribute by attribute what templates print of tiles of 8 bits. narrow: whether there are any;
    narrow_parts: of which tensors.
    """

    narrow: bool
    narrow_parts: tuple[NarrowPart, ...]

    def plan_narrow(self, narrow: Narrow) -> None:
        """Sets what is converted."""
        self.narrow = bool(narrow)
        self.narrow_parts = narrow_parts(narrow, self.layout, self.module.variant.attention)

    @property
    @abstractmethod
    def first_raw(self) -> str:
        """Where tiles of 8 bits begin in shared memory."""

    @property
    def wide(self) -> str:
        """The one of k and v that comes in 16 bits beside the other."""
        converted = [part.name for part in self.narrow_parts]
        return "" if self.v_in_k or len(converted) != 1 else "k" if converted == ["v"] else "v"

    @property
    def raw_places(self) -> str:
        """Where tiles of 8 bits begin, and end, as declarations."""
        places, at = [], self.first_raw
        for part in self.narrow_parts:
            name = f"RAW_{part.letter}"
            places.append(f"{name}_BYTES = {part.panels} * BLOCK_N * 128, {name}_AT = {at}")
            at = f"{name}_AT + RAW_TILES * {name}_BYTES"
        return ", ".join([*places, f"RAW_END = {at}"])

    def byte_pool(self, name: str) -> str:
        """Returns where rows of K or V of the head at hand lie, in bytes."""
        tensor = self.rows(name).tensor
        strides = f"args.stride_{tensor}p, args.stride_{tensor}n"
        return f"byte_pool(args.{tensor}_ptr + {self.offset(name)}, {strides})"


def narrow_parts(narrow: Narrow, layout: CudaLayout, attention: Attention) -> tuple[NarrowPart, ...]:
    """Returns the tensors of k and v that are converted, in the order in which they lie in shared memory."""
    columns = {"k": layout.d, "v": layout.dv}
    dtypes = {"k": attention.k.dtype, "v": attention.v.dtype}
    return tuple(
        NarrowPart(
            name=name,
            stored=str(dtypes[name]),
            number=number,
            panels=pieces_of_bytes(columns[name]),
            columns=columns[name],
        )
        for number, name in enumerate(narrow.tensors)
    )
