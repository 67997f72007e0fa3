"""What every `.cu` file of a backward begins with: types, sizes, the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnc.plan.ir import Module
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.sm80 import backward_layout_of
from attnc.target.numbers import Number
from attnc.target.sm80.arguments import Arguments
from attnc.target.sm80.backward_places import BackwardPlaces
from attnc.target.sm80.elements import ElementText
from attnc.target.sm80.printer import STORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a kernel is compiled with: rows and keys of its tiles, warps, tiles that are copied ahead."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def default_of(planned: BackwardKernel) -> Launch:
    """The first config of a kernel."""
    config = planned.configs[0]
    sizes = config.tile_q, config.tile_kv, config.warps, config.stages
    return Launch(**dict(zip(("block_m", "block_n", "warps", "stages"), sizes, strict=True)))


class CudaFileText(ElementText):
    """What every `.cu` file of a backward begins with."""

    #: What `_device.cu.jinja` asks: whether a unified maximum falls back.
    finds_top = False
    page = 0
    bounds = "__launch_bounds__(THREADS)"
    makes_tiles = False
    numbers: tuple[Number, ...] = ()

    def __init__(self, module: Module, arguments: Arguments, name: str, default: Launch) -> None:
        assert module.backward is not None
        self.module, self.arguments, self.name, self.launch = module, arguments, name, default
        self.plan = backward_layout_of(module.backward)
        self.layout = self.plan.layout
        self.element = self.ptx = STORED[self.layout.element]
        self.padded = (self.layout.d, self.layout.dv) != (self.layout.qk.width, self.layout.v.width)
        self.d_tile, self.dv_tile = ("D_TILE", "DV_TILE") if self.padded else ("D", "DV")
        self.dtypes = arguments.dtypes
        self.places = BackwardPlaces(arguments)

    @property
    def rounded_types(self) -> list[str]:
        """16-bit floats that gradients other than those of q, k and v are written as."""
        return self.arguments.rounded_types

    @property
    def fields(self) -> Iterator[str]:
        return self.arguments.fields

    @property
    def constants(self) -> Iterator[str]:
        """Sizes that follow from the configuration."""
        yield from ()

    @property
    def dq_constants(self) -> Iterator[str]:
        """How the warps of the kernel for dk and dv share a tile of dq."""
        yield "constexpr int DQ_ROWS = BLOCK_M % 32 == 0 && WARPS % (BLOCK_M / 32) == 0 ? 32 : BLOCK_M;"
        yield "constexpr int DQ_WARPS = WARPS * DQ_ROWS / BLOCK_M;  // warps that share its rows"
        yield f"constexpr int DQ_COLUMNS = ({self.d_tile} / 16 + DQ_WARPS - 1) / DQ_WARPS * 16;"
        yield "constexpr int DQ_SIZE = BLOCK_M * DQ_COLUMNS * DQ_WARPS;"

    # -- elements ------------------------------------------------------------------------------------------

    @property
    def products(self) -> str:
        return super().products.replace("/_products", "/_backward_products")

    @property
    def period(self) -> str:
        """Chunks that the rows of a tile of WIDTH elements permute."""
        return (
            "WIDTH % 32 == 0 ? 8 : 4"
            if self.layout.is_f32
            else "WIDTH % 64 == 0 ? 8 : WIDTH % 32 == 0 ? 4 : 2"
        )

    def left(self, rows: str) -> str:
        """The declaration of pieces of an accumulator as left operands."""
        if self.layout.is_f32:
            return f"Operand left[{rows} / 16][COLUMNS / 8];"
        return f"u32 left[{rows} / 16][COLUMNS / 16][4];"

    def as_float(self, element: str) -> str:
        return element if self.layout.is_f32 else f"to_float({element})"
