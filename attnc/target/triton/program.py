"""Which tile is a program's, of which sequence and head: what `templates/triton/_program.py.jinja` prints."""

from __future__ import annotations

from attnc.plan.ir import Loop
from attnc.target.kernel_view import KernelView
from attnc.target.triton.printer import scalar, transposed


class ProgramText(KernelView):
    """What texts of forward and backward kernels have in common."""

    #: q tiles of a head where the grid counts sequences, and the name for the number of heads of k and v.
    own_q_tiles = "tl.cdiv(M, BLOCK_M)"
    kv_heads = "H"

    @property
    def q_tiles(self) -> str:
        """How many q tiles a head has, over all sequences if they are packed."""
        return self.own_q_tiles if self._in_grid else f"{self._packed_rows} // BLOCK_M + B + 1"

    @property
    def kv_tiles(self) -> str:
        """The same of kv tiles."""
        return "tl.cdiv(N, BLOCK_N)" if self._in_grid else f"{self._packed_rows} // BLOCK_N + B + 1"

    @property
    def all_heads(self) -> str:
        return "B * H" if self._in_grid else "H"

    @property
    def all_kv_heads(self) -> str:
        return f"B * {self.kv_heads}" if self._in_grid else self.kv_heads

    @property
    def h_kv(self) -> str:
        return scalar(self.kernel.kv_head)

    @property
    def find_sequence(self) -> str:
        """The sequence of the program's tile."""
        sequences = self.kernel.grid.sequences
        assert sequences is not None
        cu, tile = sequences.cu_seqlens, "BLOCK_M" if self.kernel.grid.over == "q" else "BLOCK_N"
        return f"_find_sequence({cu}_ptr, stride_{cu}_0, rank // heads, B, {self._packed_rows}, {tile})"

    @property
    def q_lo(self) -> str:
        longest = self.kernel.grid.longest_first
        return "(q_tiles - 1 - rank // heads) * BLOCK_M" if longest else "rank // heads * BLOCK_M"

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

    @property
    def _in_grid(self) -> bool:
        """Whether sequences are counted by the grid, not found among packed rows."""
        return self.kernel.grid.sequences is None

    @property
    def _packed_rows(self) -> str:
        assert self.kernel.grid.sequences is not None
        return scalar(self.kernel.grid.sequences.rows)
