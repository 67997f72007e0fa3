"""Bytes that a CUDA kernel moves, counted from its plan: through shared memory, and between it and global
memory.

What the FlashAttention papers argue with: the loop order decides how often o, l and m travel through global
memory, the split of a tile among warps how often partial results travel through shared memory. Reads from
global memory are counted as the kernel asks for them; most of a K/V tile's come out of the L2 cache."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.model.schedule import Config
from attnc.plan.cuda_layout import CudaLayout, integer
from attnc.plan.ir import Kernel
from attnc.plan.picture import Picture

_F32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one launch for one head: asked of and given to global memory, read from and written to
    shared memory.
    """

    global_read: int
    global_written: int
    shared_read: int
    shared_written: int

    def times(self, heads: int) -> Traffic:
        """Of so many heads."""
        return Traffic(
            global_read=heads * self.global_read,
            global_written=heads * self.global_written,
            shared_read=heads * self.shared_read,
            shared_written=heads * self.shared_written,
        )

    @property
    def moved(self) -> int:
        """Between the multiprocessors and the L2 cache."""
        return self.global_read + self.global_written

    @property
    def shared(self) -> int:
        return self.shared_read + self.shared_written


def traffic(kernel: Kernel, layout: CudaLayout, config: Config, tiles: Picture) -> Traffic:
    """The bytes of one head, for the tiles that `tiles` says are visited."""
    size, qk, v = layout.element.bytes, layout.qk.width, layout.v.width
    tile_q, tile_kv = integer(config, "tile.q"), integer(config, "tile.kv")
    warps = integer(config, "warps")
    q_tiles, kv_tiles = -(-tiles.queries // tile_q), -(-tiles.keys // tile_kv)
    steps = tiles.visited
    q_bytes, k_bytes, v_bytes = (
        rows * width * size for rows, width in ((tile_q, qk), (tile_kv, qk), (tile_kv, v))
    )
    o_bytes = tiles.queries * layout.dv * size
    state = (tile_q * layout.dv + 2 * tile_q) * _F32  # o, l and m of a query tile between its visits
    # Fragments: split-Q reads all of K and V once for each warp, split-K all of Q.
    factor_q, factor_kv = (1, warps) if layout.warp_split == "q" else (warps, 1)
    fragments = factor_q * q_bytes + factor_kv * (k_bytes + v_bytes)
    exchanged = 0
    if layout.warp_split == "kv":
        exchanged = warps * tile_q * v * _F32 + warps * tile_q * _F32
    if kernel.structure == "forward_q_kv":
        copied = q_tiles * q_bytes + steps * (k_bytes + v_bytes)
        return Traffic(
            global_read=copied,
            global_written=o_bytes,
            shared_read=steps * (fragments + exchanged) + q_tiles * tile_q * v * size,
            shared_written=copied + steps * exchanged + q_tiles * tile_q * v * size,
        )
    copied = kv_tiles * (k_bytes + v_bytes) + steps * q_bytes
    whole = tiles.queries * (layout.dv + 2) * _F32
    return Traffic(
        global_read=copied + steps * state + whole,
        global_written=steps * state + whole + o_bytes,
        shared_read=steps * (fragments + exchanged),
        shared_written=copied + steps * exchanged,
    )
