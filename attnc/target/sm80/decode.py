"""The pieces of a CUDA decode kernel's text, and of the kernel that joins its splits."""

from __future__ import annotations

from attnc.expr.nodes import Const, Ref, show, walk
from attnc.model.tensors import Role
from attnc.plan.decode import has_fixed_splits
from attnc.plan.ir import Decode, Module
from attnc.plan.regions import ZERO
from attnc.plan.sm80.layout import CudaLayout
from attnc.target.locals import local
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm80.printer import scalar
from attnc.target.sm80.tiles import PLACES


class CudaDecodeText(CudaText):
    """Attribute by attribute what `templates/cuda/decode.cu.jinja` and `combine.cu.jinja` print."""

    kernel: Decode

    def __init__(self, module: Module, kernel: Decode, layout: CudaLayout) -> None:
        super().__init__(module, kernel, layout)
        self.is_split = kernel.split is not None
        self.has_fixed_splits = has_fixed_splits(kernel)
        self.update = "q" if layout.warp_split == "q" or self.own_copies else "kv"
        self.finish = "rows" if layout.warp_split == "q" else "warps" if self.own_copies else "sums"
        self.combine_name = f"{module.variant.attention.name}_combine"
        self.one_kv_head = kernel.kv_head == Const(0)
        self.kv_heads = show(module.variant.attention.k.size(Role.HEAD))

    # -- rows ----------------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        return "" if self.kernel.pack is None else scalar(self.kernel.pack.group)

    def all_rows(self, queries: str) -> str:
        """Rows of a KV head with so many queries."""
        return f"{queries} * {self.group}" if self.group else queries

    @property
    def heads(self) -> list[str]:
        """From the number of a tile to b, the head, and the first q row."""
        if not self.group:
            place = {"b": "tile / row_tiles / H", "h": "tile / row_tiles % H", "q_lo": "row_lo"}
            lines = [local("const int", place)]
            lines.append(local("const int", h_kv=self.h_kv))
        else:
            lines = ["const int b = tile / row_tiles;"]
            if not self.one_kv_head:
                lines = ["const int b = tile / row_tiles / Hkv, h_kv = tile / row_tiles % Hkv;"]
            lines.append(local("const int", q_lo=f"row_lo / {self.group}"))
        return lines

    @property
    def last_row(self) -> list[str]:
        """The last q row of the tile that the sequence has."""
        last = f"min(row_lo + BLOCK_M, {self.all_rows('M')}) - 1"
        if self.group:
            last = f"({last}) / {self.group}"
        return [local("const int", q_hi=last)]

    def query_of(self, row: str) -> str:
        return f"{row} / {self.group}" if self.group else row

    def head_of(self, row: str) -> str:
        if not self.group:
            return "h"
        return f"{self.first_head}{row} % {self.group}"

    @property
    def first_head(self) -> str:
        """The first head of the group, as a summand."""
        return "" if self.one_kv_head else f"h_kv * {self.group} + "

    @property
    def q_idx(self) -> str:
        return f"(row_lo + {self.row}) / {self.group}" if self.group else f"row_lo + {self.row}"

    @property
    def row_head(self) -> str:
        return f"{self.first_head}(row_lo + {self.row}) % {self.group}"

    @property
    def rows_have_heads(self) -> bool:
        sink = self.kernel.softmax.sink
        found = (*self._expressions(), *(() if sink is None else (sink,)))
        return bool(self.group) and any(
            isinstance(node, Ref) and node.name == "h" for expr in found for node in walk(expr)
        )

    def place(self, name: str) -> str:
        if not self.group or name not in ("q", "o"):
            return super().place(name)
        first = f"args.{name}_ptr + b * args.stride_{name}b"
        if not self.one_kv_head:
            first += f" + h_kv * {self.group} * args.stride_{name}h"
        kind = "Heads<element>" if name == "o" else "Heads<const element>"
        strides = f"args.stride_{name}m, args.stride_{name}h"
        return f"const {kind} {PLACES[name]} = {{{first}, {strides}, {self.group}}};"

    @property
    def lse_at(self) -> str:
        """Of query q of head `head`."""
        return "args.lse_ptr[b * args.stride_lseb + head * args.stride_lseh + q * args.stride_lsem]"

    def if_exists(self, value: str, otherwise: str) -> str:
        return f"q < M ? {value} : {otherwise}" if self.clears else value

    # -- splits --------------------------------------------------------------------------------------------

    @property
    def more_pointers(self) -> list[str]:
        splits = ["float* o_splits_ptr;", "float* lse_splits_ptr;"] if self.is_split else []
        return [*splits, *(["int* fallbacks_ptr;"] if self.finds_top else [])]

    @property
    def size_names(self) -> list[str]:
        splits = ["SPLITS", *(["SPLIT_SIZE"] if self.has_fixed_splits else [])]
        return [*self.kernel.dims, *(splits if self.is_split else [])]

    @property
    def end(self) -> str:
        return "split_hi" if self.is_split else "hi"

    @property
    def own_split(self) -> list[str]:
        split = self.kernel.split
        if split is None:
            return []
        lo, hi = scalar(split.lo), scalar(split.hi)
        visited = f"max({hi if split.lo == ZERO else f'{hi} - {lo}'}, 0)"
        tiles = f"({visited} + BLOCK_N - 1) / BLOCK_N"
        fixed = "args.SPLIT_SIZE > 0 ? args.SPLIT_SIZE : " if self.has_fixed_splits else ""
        first = "split * split_size" if split.lo == ZERO else f"{lo} + split * split_size"
        return [
            "// this block's split: whole tiles, as many as the others have, or what is left of them",
            f"const int split_size = {fixed}({tiles} + args.SPLITS - 1) / args.SPLITS * BLOCK_N;",
            f"const int split_lo = {first}, split_hi = min(split_lo + split_size, {hi});",
        ]

    def in_first_split(self, value: str, otherwise: str) -> str:
        return f"split == 0 ? {value} : {otherwise}" if self.is_split else value

    @property
    def first_m(self) -> str:
        return self.in_first_split(super().first_m, "-INF")

    @property
    def first_lane(self) -> str:
        lane = super().first_lane
        return f"{lane} && split == 0" if self.is_split else lane

    @property
    def split_row(self) -> str:
        """The number of the result for query q of head `head`."""
        return f"((long long)(b * H + head) * {self.stored} + q) * args.SPLITS + split"
