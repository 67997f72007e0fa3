"""Where rows of q, k, v, o, lse and their gradients lie in the kernels of a backward."""

from __future__ import annotations

from attnc.expr.nodes import Const, Index
from attnc.model.tensors import Role
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.signature import RowZero, stride_name
from attnc.target.kernel_view import BY_QUERY, Tensors
from attnc.target.sm80.printer import offset


class BackwardPlaces:
    """Where rows lie in the kernels of a backward.

    Kernels copy lse2 and delta 16 bytes at a time, and past the end of a sequence. So packed sequences have
    padded rows there: those of sequence b begin at row (cu_seqlens[b] / ROW_TILE + b) * ROW_TILE of their
    head, with ROW_TILE the most rows of a q tile of any kernel: the numbering of q tiles of that height
    (`access.Sequences`), in rows.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.packs_queries = tensors.packs(Role.QUERY)

    def offset(self, name: str, head: str) -> str:
        """Returns the offset from the first element of a tensor or its gradient to row 0 of the head and
        sequence at hand.
        """
        return offset(self._tensors.row_zero(name, head))

    def first_row(self, sequence: str) -> str:
        """Returns row 0 of the head and sequence at hand in lse2 and delta; sequence: its number, if
        packed.
        """
        if self.packs_queries:
            first = f"(q_first / args.ROW_TILE + {sequence}) * args.ROW_TILE"
            return f"(long long)h * args.M_padded + {first}"
        return "(long long)(b * H + h) * args.M_padded"

    @property
    def dq_tiles(self) -> str:
        """The q tiles of a head, as sums of dq are numbered, of `BLOCK_M` rows."""
        return "args.M_padded / BLOCK_M" if self.packs_queries else "(args.M + BLOCK_M - 1) / BLOCK_M"

    @property
    def dq_tile(self) -> str:
        if self.packs_queries:
            return "h * dq_tiles + q_first / BLOCK_M + b + q_lo / BLOCK_M"
        return "(b * H + h) * dq_tiles + q_lo / BLOCK_M"


class BackwardRows(BackwardPlaces):
    """The same in one kernel. kv_name: the index of its K/V head; first: row 0 of lse2 and delta."""

    def __init__(self, tensors: Tensors, kernel: BackwardKernel) -> None:
        super().__init__(tensors)
        self.kv_name = "h" if kernel.kv_head == Index("h") else "h_kv"
        self._kv_head = "" if kernel.kv_head == Const(0) else self.kv_name
        self.first = self.first_row("sequence" if kernel.over_q else "b")

    def zero(self, name: str) -> RowZero:
        """Returns where row 0 of a matrix or gradient lies, of the head and sequence at hand."""
        return self._tensors.row_zero(name, "h" if name in BY_QUERY else self._kv_head)

    def head_offset(self, name: str) -> str:
        """Returns the offset from the first element of a matrix to the rows of the head and sequence at
        hand.
        """
        return offset(self.zero(name))

    def stride(self, name: str) -> str:
        tensor = self._tensors.by_name[name]
        axis = tensor.axis(Role.QUERY if name in BY_QUERY else Role.KEY)
        assert axis is not None
        return stride_name(tensor, axis)
