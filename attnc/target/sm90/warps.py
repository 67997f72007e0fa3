"""The pieces of the text of a Hopper decode kernel whose warps have keys of their own."""

from __future__ import annotations

from dataclasses import replace

from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Module
from attnc.plan.sm90.warps import BLOCKS, Sm90WarpsLayout
from attnc.target.sm90.decode import Sm90DecodeText


class Sm90WarpsText(Sm90DecodeText):
    """Attribute by attribute what `templates/sm90/decode_warps.cu.jinja` and its parts print besides what
    other decode kernels have.

    in_turn: fragments of o have the even and the odd ones of 16 columns; has_narrow: k or v has 8 bits.
    """

    layout: Sm90WarpsLayout
    body, frame = "decode_warps", "warps_module"
    score_keys, first_raw = "WARP_N", "0"
    stores_in_order = True

    def __init__(self, module: Module, kernel: Decode, layout: Sm90WarpsLayout) -> None:
        super().__init__(module, kernel, layout)
        self.thread = replace(self.thread, row="8 * r + g")
        self.blocks = BLOCKS
        attention = module.variant.attention
        self.in_turn = DType(attention.v.dtype).is_narrow
        self.has_narrow = self.in_turn or DType(attention.k.dtype).is_narrow

    @property
    def clears_values(self) -> bool:
        return False  # a warp clears its own
