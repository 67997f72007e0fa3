"""The pieces of a Hopper decode kernel's text, and of the kernel that joins its shares."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Const
from attnc.model.tensors import Role
from attnc.plan.ir import Arg, Kernel, Let, Module
from attnc.plan.sm90.decode import BLOCKS, REGISTERS, Sm90DecodeLayout
from attnc.target.sm80.decode import CudaDecodeText
from attnc.target.sm90.wgmma import wgmma


class Sm90DecodeText(CudaDecodeText):
    """Attribute by attribute what `templates/sm90/decode.cu.jinja` and its parts print; scores, masks and
    shares are as for `cuda.sm_80`.
    """

    layout: Sm90DecodeLayout
    is_decode = True
    is_backward = searches_together = False
    starts_early = True
    shared_declaration = "extern __shared__ __align__(1024) unsigned char shared[];"

    def __init__(self, module: Module, kernel: Kernel, layout: Sm90DecodeLayout) -> None:
        super().__init__(module, kernel, layout)
        self.shares_columns = layout.consumers == 2
        self.keeps_rest = self.shares_columns and layout.rest > 0
        self.registers, self.blocks = REGISTERS[layout.consumers], BLOCKS[layout.consumers]
        self.v_at = "K_AT" if layout.v_in_k else "V_AT"
        self.v_bytes = "K_BYTES" if layout.v_in_k else "V_BYTES"

    # -- tiles ---------------------------------------------------------------------------------------------

    @property
    def key_tiles(self) -> list[int]:
        """Keys of a tile, over all configs."""
        return sorted({config.number("tile.kv") for config in self.kernel.configs})

    @property
    def value_columns(self) -> int:
        """Of o, that a warpgroup has."""
        return self.layout.columns

    def wgmma(self, columns: int, *, registers: bool, by_rows: bool | None = None) -> str:
        return wgmma(columns, self.ptx, registers=registers, by_rows=by_rows)

    @property
    def parts_of_a_stage(self) -> str:
        if self.shares_columns:
            return "the columns of V that each warpgroup multiplies; what is not in V comes with either"
        return "K, with V in it" if self.v_in_k else "K and V"

    @property
    def box(self) -> str:
        """Keys that are copied at once: the same divisor of all tiles of keys."""
        boxes = [f"BLOCK_N == {tile} ? {self.layout.box(tile)} : " for tile in self.key_tiles[1:]]
        return f"{''.join(boxes)}{self.layout.box(self.key_tiles[0])}"

    @property
    def row(self) -> str:
        return "16 * warp + 8 * r + g"

    @property
    def exponent(self) -> str:
        """Of p, from a score."""
        return f"s[j][2 * r + c]{self.times_scale} - m[r]"

    @property
    def first_column(self) -> str:
        """Of o, as a summand."""
        return "consumer * COLUMNS + " if self.shares_columns else ""

    @property
    def first_lane(self) -> str:
        lane = super().first_lane
        return f"consumer == 0 && {lane}" if self.shares_columns else lane

    @property
    def clears_values(self) -> bool:
        """Whether rows of v in a partial tile have to be made zero: TMA does so behind the tensor alone."""
        return self.kernel.step.kept is not None or any(
            isinstance(item, Let) and item.name == "N" for item in self.kernel.program
        )

    # -- arguments -----------------------------------------------------------------------------------------

    @property
    def maps(self) -> list[str]:
        """Tensors that TMA copies from."""
        return ["k"] if self.v_in_k else ["k", "v"]

    @property
    def arguments(self) -> list[Arg]:
        """What the kernel reads and writes itself."""
        return [arg for arg in super().arguments if arg.tensor.name not in self.maps]

    @property
    def fields(self) -> Iterator[str]:
        yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        yield from super().fields

    @property
    def box_rows(self) -> str:
        """Rows of a box of the maps, as a declaration says it."""
        return f"gcd({self.page}, BLOCK_N)" if self.page else "BLOCK_N"

    def coordinates(self, name: str, row: str, page: str = "") -> str:
        """Row, head and batch, or page, of a box of keys."""
        rows = self.rows(name)
        tensor = next(arg.tensor for arg in self.module.args if arg.tensor.name == rows.tensor)
        row = row if rows.first is None else f"{rows.first} + {row}"
        has_head = tensor.axis(Role.HEAD) is not None and self.kernel.kv_head != Const(0)
        head = ("h" if self.h_kv == "h" else "h_kv") if has_head else "0"
        has_batch = tensor.axis(Role.BATCH) is not None and rows.first is None
        return f"{row}, {head}, {page or ('b' if has_batch else '0')}"

    def row_at(self, name: str) -> str:
        """Where row `row` of q or o begins."""
        first = f"args.{name}_ptr + b * args.stride_{name}b"
        query, head = self.query_of("row"), self.head_of("row")
        return f"{first} + ({query}) * args.stride_{name}m + ({head}) * args.stride_{name}h"
