"""How dq, dk and dv of Hopper's kernels leave, as text."""

from __future__ import annotations

from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm90.tiles import WgmmaTiles


class GradientStores:
    """The gradients that one kernel makes."""

    def __init__(self, arguments: ArgumentText, wgmma: WgmmaTiles) -> None:
        self._as_elements, self._wgmma = arguments.as_elements, wgmma

    def multiplied(self, name: str) -> str:
        """Returns the columns of a sum."""
        return "DV" if name == "dv" else "D"

    def columns(self, name: str) -> str:
        """Returns the columns of rows in memory."""
        return self._wgmma.dv_stored if name == "dv" else self._wgmma.d_stored

    def sums(self, name: str) -> str:
        """Returns a sum without the columns that are not stored."""
        columns = self.columns(name)
        is_part = self.multiplied(name) != columns
        return f"(const float (&)[{columns} / 8][4]){name}" if is_part else name

    def is_summed(self, name: str) -> bool:
        """Returns whether a gradient leaves in f32, to be added to."""
        return name != "dq" and name not in self._as_elements
