"""The tiles of a Triton backward kernel as text: where they lie, how they are loaded and stored."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Index
from attnc.model.tensors import DType
from attnc.plan.columns import block
from attnc.plan.ir import Module
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.tensors import BY_QUERY
from attnc.target.triton.printer import TL_DTYPES
from attnc.target.triton.program import ProgramText
from attnc.target.triton.tensors import TritonTensors


class BackwardTileText(ProgramText):
    """Attribute by attribute what `templates/triton/backward_*.py.jinja` print of tiles."""

    own_q_tiles = "M_padded // BLOCK_M"

    def __init__(self, module: Module, planned: BackwardKernel) -> None:
        self.module, self.planned, self.kernel = module, planned, planned.kernel
        self.chain, self.makes = planned.chain, planned.makes
        self.tensors, attention = TritonTensors(module), module.variant.attention
        self.over_q, self.groups = planned.over_q, planned.sums_heads
        self.block_d, self.block_dv = block(self.tensors.d), block(self.tensors.dv)
        self.packs_queries = attention.q.storage.is_packed
        self.is_packed = self.packs_queries or attention.k.storage.is_packed
        self.kv_heads = "Hkv" if self.groups else "H"
        self.kv_name = "h" if self.kernel.kv_head == Index("h") else "h_kv"
        self.needs_dp = self.makes != ("dv",)

    def offset(self, name: str) -> str:
        in_head = name in ("q", "do", "dq", "o")
        return self.tensors.offset(name, "h" if in_head else self.kv_name)

    def _tile(self, text: str, name: str) -> str:
        """The load of a tile of q, k, v or do; `text` names the matrix."""
        start, stop, rows, head = (
            ("q_lo", "M", "BLOCK_M", "h") if name in BY_QUERY else ("kv_lo", "N", "BLOCK_N", self.kv_name)
        )
        letter = "m" if name in BY_QUERY else "n"
        width = self.tensors.width(name)
        where = f"b, {head}, " if self.kernel.tma else ""
        tma = ", TMA" if self.kernel.tma else ""
        return f"_load_rows({text}, {where}{start}, {stop}, stride_{name}{letter}, {rows}, {width}{tma})"

    @property
    def load_q(self) -> str:
        return self._tile("Q" if self.over_q else "q_head", "q")

    @property
    def load_k(self) -> str:
        return self._tile("K", "k")

    @property
    def load_v(self) -> str:
        return self._tile("V", "v")

    @property
    def load_do(self) -> str:
        tensors = self.tensors.by_name
        same = tensors["o"].dtype == tensors["v"].dtype
        convert = "" if same else f".to({TL_DTYPES[DType(tensors['v'].dtype)]})"
        return self._tile("DO" if self.over_q else "do_head", "do") + convert

    @property
    def load_o(self) -> str:
        return self._tile("O", "o")

    def load_vector(self, name: str) -> str:
        """lse2 or delta of the q tile at hand."""
        if self.packs_queries:
            beyond = 'float("inf")' if name == "lse2" else "0.0"
            return f"tl.load({name}_head + q_idx, mask=q_idx < M, other={beyond})"
        tma = self.kernel.tma
        return f"_load_vector({name}_head, {'row, ' if tma else ''}q_lo, BLOCK_M{', TMA' if tma else ''})"

    @property
    def heads(self) -> Iterator[str]:
        """Pointers to what belongs to one query head, where there are no descriptors."""
        yield f"q_head = Q + {self.offset('q')}"
        yield f"do_head = DO + {self.offset('do')}"
        for name in ("lse2", *(("delta",) if self.needs_dp else ())):
            at = "first_row" if self.packs_queries else "row.to(tl.int64) * M_padded"
            yield f"{name}_head = {name.upper()} + {at}"

    @property
    def first_row(self) -> str:
        """Where the head's rows begin in lse2 and delta."""
        if self.packs_queries:
            return f"h.to(tl.int64) * {self.tensors.packed_queries} + q_first"
        return f"{'(b * H + h)' if self.over_q else 'row'}.to(tl.int64) * M_padded"

    def store(self, name: str) -> str:
        """The store of dq, dk or dv, scaled as the chain rule says."""
        start, stop, rows, head, letter = (
            ("q_lo", "M", "BLOCK_M", "h", "m")
            if name in BY_QUERY
            else ("kv_lo", "N", "BLOCK_N", self.kv_name, "n")
        )
        scale = "" if name == "dv" or self.chain.scale == 1.0 else f" * {self.chain.scale!r}"
        tile = f"({name}{scale})" if scale else name
        dtype = TL_DTYPES[DType(self.tensors.by_name[name].dtype)]
        where = f"b, {head}, " if self.kernel.tma else ""
        tma = ", TMA" if self.kernel.tma else ""
        return (
            f"_store_rows({name.upper()}, {where}{start}, {stop}, stride_{name}{letter}, "
            f"{tile}.to({dtype}), {rows}, {self.tensors.width(name)}{tma})"
        )

    @property
    def dq_mask(self) -> str:
        inside = "" if self.tensors.d == self.block_d else f" & (d[None, :] < {self.tensors.d})"
        return f"(q_idx < M)[:, None]{inside}"
