"""Bytes that a CUDA kernel moves, counted from its plan: through shared memory, and between it and global
memory.

What the FlashAttention papers argue with: the loop order decides how often o, l and m travel through global
memory, the split of a tile among warps how often partial results travel through shared memory. Reads from
global memory are counted as the kernel asks for them; most of a K/V tile's come out of the L2 cache."""

from __future__ import annotations

from attnc.model.schedule import TileConfig
from attnc.plan.device import Device
from attnc.plan.estimate import DeviceMemory, Traffic
from attnc.plan.ir import OutputKernel
from attnc.plan.picture import Picture
from attnc.plan.sm80.layout import CudaLayout

_F32 = 4
#: Bytes of shared memory that the system keeps in every block.
_RESERVED = 1024


def traffic(kernel: OutputKernel, layout: CudaLayout, config: TileConfig, tiles: Picture) -> Traffic:
    """The bytes of one head, for the tiles that `tiles` says are visited."""
    size, qk, v = layout.element.bytes, layout.qk.width, layout.v.width
    tile_q, tile_kv = config.tile_q, config.tile_kv
    warps = config.warps
    q_tiles, kv_tiles = -(-tiles.queries // tile_q), -(-tiles.keys // tile_kv)
    steps = tiles.visited
    q_bytes, k_bytes, v_bytes = (
        rows * width * size for rows, width in ((tile_q, qk), (tile_kv, qk), (tile_kv, v))
    )
    results = tiles.queries * (layout.dv * size + _F32)  # o and lse
    # Fragments: split-Q reads all of K and V once for each warp, split-K all of Q.
    factor_q, factor_kv = (1, warps) if layout.warp_split == "q" else (warps, 1)
    fragments = factor_q * q_bytes + factor_kv * (k_bytes + v_bytes)
    exchange_read, exchange_written = _exchange(kernel, layout, config)
    if kernel.structure != "forward_kv_q":
        copied = q_tiles * q_bytes + steps * (k_bytes + v_bytes)
        o_tile = q_tiles * tile_q * v * size
        return Traffic(
            global_read=copied,
            global_written=results,
            shared_read=steps * (fragments + exchange_read) + o_tile,
            shared_written=copied + steps * exchange_written + o_tile,
        )
    copied = kv_tiles * (k_bytes + v_bytes) + steps * q_bytes
    o_state, rows_state = tile_q * layout.dv * _F32, 2 * tile_q * _F32  # of a query tile between its visits
    whole = tiles.queries * (layout.dv + 2) * _F32
    # Under split-K every warp has all rows, and reads l and m of them.
    return Traffic(
        global_read=copied + steps * (o_state + factor_q * rows_state) + whole,
        global_written=steps * (o_state + rows_state) + whole + results,
        shared_read=steps * (fragments + exchange_read),
        shared_written=copied + steps * exchange_written,
    )


def device_memory(
    kernel: OutputKernel, layout: CudaLayout, config: TileConfig, tiles: Picture, heads: int, device: Device
) -> DeviceMemory:
    """q, k, v, o and lse once; all that is asked for where the L2 cache does not hold what FlashAttention-1
    carries between visits, for the heads that run at once.
    """
    size = layout.element.bytes
    q, kv = tiles.queries * layout.d * size, tiles.keys * (layout.d + layout.dv) * size
    results = tiles.queries * (layout.dv * size + _F32)
    if kernel.structure != "forward_kv_q":
        return DeviceMemory(read=heads * (q + kv), written=heads * results, spills=False)
    state = tiles.queries * (layout.dv + 2) * _F32
    blocks = device.shared_per_sm // (sum(layout.shared_memory(config).values()) + _RESERVED)
    at_once = min(heads, device.sms * max(1, blocks))
    spills = at_once * (q + state) > device.l2
    if not spills:
        return DeviceMemory(read=heads * (q + kv), written=heads * results, spills=False)
    moved = traffic(kernel, layout, config, tiles).times(heads)
    return DeviceMemory(read=moved.global_read, written=moved.global_written, spills=True)


def _exchange(kernel: OutputKernel, layout: CudaLayout, config: TileConfig) -> tuple[int, int]:
    """Bytes of shared memory read and written in a step to sum what the warps of split-K have found."""
    if layout.warp_split != "kv" or layout.merge == "end":  # at the end it is little beside the tiles
        return 0, 0
    tile_q, warps, v = config.tile_q, config.warps, layout.v.width
    row = tile_q * _F32
    # The maxima of all warps; FlashAttention-1 also needs the sums in every step.
    statistics = 2 if kernel.softmax.rescale == "every_step" else 1
    partial = warps * row * v
    read = partial + statistics * warps * warps * row + v // layout.exchange * row
    return read, partial + statistics * warps * row + row
