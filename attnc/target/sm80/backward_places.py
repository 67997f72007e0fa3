"""Where rows lie in CUDA backward kernels: of sequences with a batch entry each, or one after the other.

Kernels copy lse2 and delta 16 bytes at a time, and past the end of a sequence. So packed sequences have
padded rows there: those of sequence b begin at row (cu_seqlens[b] / ROW_TILE + b) * ROW_TILE of their head,
with ROW_TILE the most rows of a q tile of any kernel: the numbering of q tiles of that height
(`access.Sequences`), in rows.
"""

from __future__ import annotations

from attnc.model.tensors import Role
from attnc.plan.signature import stride_name
from attnc.target.sm80.arguments import Arguments
from attnc.target.tensors import BY_QUERY


class BackwardPlaces:
    """The same for every kernel of a backward, as text."""

    def __init__(self, arguments: Arguments) -> None:
        self._tensors = arguments.tensors
        self.packs_queries = self._tensors.packs(Role.QUERY)
        self.packs_keys = self._tensors.packs(Role.KEY)

    def offset(self, name: str, head: str) -> str:
        """From the first element of a tensor or its gradient to row 0 of the head and sequence at hand."""
        tensor = self._tensors.by_name[name]
        by_query = name in BY_QUERY or name.endswith("lse")
        rows, first = (Role.QUERY, "q_first") if by_query else (Role.KEY, "k_first")
        terms = [(first, rows) if self._tensors.packs(rows) else ("b", Role.BATCH)]
        terms += [(head, Role.HEAD)] if head else []
        found = [
            f"{index} * args.{stride_name(tensor, axis)}"
            for index, role in terms
            if (axis := tensor.axis(role)) is not None
        ]
        return " + ".join(found) or "0"

    def first_row(self, sequence: str) -> str:
        """Row 0 of the head and sequence at hand in lse2 and delta; sequence: its number, if packed."""
        if self.packs_queries:
            first = f"(q_first / args.ROW_TILE + {sequence}) * args.ROW_TILE"
            return f"(long long)h * args.M_padded + {first}"
        return "(long long)(b * H + h) * args.M_padded"
