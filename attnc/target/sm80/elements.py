"""The pieces of a CUDA kernel's text that depend on the element type of q, k, v and o."""

from __future__ import annotations

from attnc.plan.sm80.layout import CudaLayout


class ElementText:
    """What `templates/cuda/*.jinja` print about elements: of 16 bits, rounded two at a time, or f32."""

    layout: CudaLayout

    @property
    def products(self) -> str:
        """The template of the products of tiles."""
        return f"cuda/_products{'_tf32' if self.layout.is_f32 else ''}.cu.jinja"

    @property
    def turns_columns(self) -> bool:
        """Whether columns of a tile are rows of a left operand."""
        return False

    @property
    def pair_type(self) -> str:
        """What two neighbouring elements of a result are in memory."""
        return "Pair" if self.layout.is_f32 else "u32"

    @property
    def no_pair(self) -> str:
        """Two zeros."""
        return "Pair{}" if self.layout.is_f32 else "0"

    def pair(self, first: str, second: str) -> str:
        """Of two floats, rounded."""
        return f"Pair{{{first}, {second}}}" if self.layout.is_f32 else f"pack({first}, {second})"

    def pair_element(self, which: int) -> str:
        """The first or the second of `pair`."""
        if self.layout.is_f32:
            return f"pair.values[{which}]"
        return f"element{{(unsigned short){'(pair >> 16)' if which else 'pair'}}}"

    def rounded(self, value: str) -> str:
        """A float as an element."""
        return value if self.layout.is_f32 else f"element{{(unsigned short)pack({value}, 0.0f)}}"

    @property
    def piece_chunk(self) -> str:
        """The chunk where the pair of a thread in 8 columns, the j-th, begins."""
        return "2 * j + t / 2" if self.layout.is_f32 else "j"

    @property
    def in_chunk(self) -> str:
        """And its place there."""
        return "t % 2 * 2" if self.layout.is_f32 else "2 * t"
