"""Text of tiles of 8 bits: their places in shared memory, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.model.attention import Attention
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.narrow import Narrow, pieces_of_bytes


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
