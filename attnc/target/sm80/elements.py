"""How CUDA kernels round and pair elements: of 16 bits, two at a time, or f32."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.model.attention import Variant
from attnc.model.dtypes import DType
from attnc.target.sm80.printer import STORED

#: Where an accumulator has the element of row r of a thread in column c of its group j.
FRAGMENT = "[r / 2][j][r % 2 * 2 + c]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Elements of 16 bits, or f32. fragment: where an accumulator has an element; only: the type of a
    kernel that is compiled for one alone, else "".
    """

    is_f32: bool
    fragment: str = FRAGMENT
    only: str = ""

    @property
    def products(self) -> str:
        return f"sm80_products{'_tf32' if self.is_f32 else ''}.cuh"

    @property
    def pair_type(self) -> str:
        return "Pair" if self.is_f32 else "u32"

    @property
    def no_pair(self) -> str:
        return "Pair{}" if self.is_f32 else "0"

    def pair(self, first: str, second: str) -> str:
        return f"Pair{{{first}, {second}}}" if self.is_f32 else f"pack({first}, {second})"

    def pair_element(self, which: int) -> str:
        if self.is_f32:
            return f"pair.values[{which}]"
        return f"element{{(unsigned short){'(pair >> 16)' if which else 'pair'}}}"

    def rounded(self, value: str) -> str:
        return value if self.is_f32 else f"element{{(unsigned short)pack({value}, 0.0f)}}"

    def as_float(self, element: str) -> str:
        return element if self.is_f32 else f"to_float({element})"

    @property
    def piece_chunk(self) -> str:
        return "2 * j + t / 2" if self.is_f32 else "j"

    @property
    def in_chunk(self) -> str:
        return "t % 2 * 2" if self.is_f32 else "2 * t"


def only_element(element: DType, variant: Variant) -> str:
    """Returns the type that the kernels of a variant are compiled for, "" where there are several."""
    return "" if variant.element_param else STORED[element]
