"""Which tile is a program's, of which sequence and head: what `templates/triton/_program.py.jinja` prints."""

from __future__ import annotations

from attnc.plan.ir import Loop
from attnc.target.kernel_view import KernelView
from attnc.target.triton.printer import scalar, transposed


class ProgramText(KernelView):
    """What texts of forward and backward kernels have in common."""

    @property
    def tile_count(self) -> str:
        """How many tiles a head has, over all sequences if they are packed."""
        walk, rows = self.kernel.walk, scalar(self.kernel.walk.rows)
        if walk.sequences is not None:
            return f"{rows} // {walk.size} + B + 1"
        return f"{rows} // {walk.size}" if walk.is_padded else f"tl.cdiv({rows}, {walk.size})"

    @property
    def all_heads(self) -> str:
        """Heads that have tiles of their own: those of all sequences, unless they are packed."""
        walk = self.kernel.walk
        return walk.heads if walk.sequences is not None else f"B * {walk.heads}"

    @property
    def h_kv(self) -> str:
        return scalar(self.kernel.kv_head)

    @property
    def find_sequence(self) -> str:
        """The sequence of the program's tile."""
        walk = self.kernel.walk
        assert walk.sequences is not None
        cu, rows = walk.sequences.cu_seqlens, scalar(walk.sequences.rows)
        return f"_find_sequence({cu}_ptr, stride_{cu}_0, rank // heads, B, {rows}, {walk.size})"

    def keys_of(self, loop: Loop) -> str:
        """What a loop over keys runs over; the one tile or so at an edge is not worth filling a pipeline."""
        bounds = f"{scalar(loop.start)}, {scalar(loop.stop)}, BLOCK_N"
        is_edge = loop.zero_fill and self.fills_when == "ZERO_FILL"
        return f"tl.range({bounds}, num_stages=1)" if is_edge else f"range({bounds})"

    @property
    def fills_when(self) -> str:
        """The condition under which a step makes rows zero that no query keeps; empty if none has to."""
        partial = [loop for loop in self.kernel.regions.loops if loop.masked is not False]
        if not any(loop.zero_fill for loop in partial):
            return ""
        if not all(loop.zero_fill for loop in partial):
            return "ZERO_FILL"
        return "MASKED" if all(loop.masked is True for loop in partial) else "True"

    @property
    def kept_rows(self) -> str:
        """Which rows of a tile of k or v some query keeps."""
        kept = self.kernel.step.kept
        assert kept is not None
        return transposed(kept)

    @property
    def keep_scale(self) -> str:
        """1 / (1 - p) of dropout; 0 where everything is dropped."""
        assert self.kernel.softmax.dropout is not None
        p = scalar(self.kernel.softmax.dropout.p)
        return f"tl.where({p} < 1.0, 1.0 / (1.0 - {p}), 0.0)"
