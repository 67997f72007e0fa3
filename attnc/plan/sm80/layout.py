"""How a CUDA kernel of the `mma.sync` family lies on the machine: fragments, shared memory, work of a warp,
and the bytes that it moves.

The unit is mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane = 4 g + t holds rows g and g
+ 8 and columns 2t, 2t + 1 of every 16 x 8 piece of an accumulator. Two neighbouring pieces of S, rounded
to 16 bits, are one 16 x 16 piece of the left operand P, so that P never leaves registers.

Of f32 it is mma.m16n8k8 on tf32, three times for one product (3xTF32: Ootomo, Yokota, "Recovering single
precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", IJHPCA
2022). What counts in bytes stays: an operand is two chunks of 16 bytes deep, and ldmatrix, which moves
rows of 16 bytes, moves four f32. The order of the depth is free, if both operands have the same: where
one piece of S is a left operand, depth t is key 2t and depth t + 4 is key 2t + 1, and P does not leave
registers either.

Traffic is what the FlashAttention papers argue with: the loop order decides how often o, l and m travel
through global memory, the split of a tile among warps how often partial results travel through shared
memory. Reads from global memory are counted as the kernel asks for them; most of a K/V tile's come out of
the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from attnc.model.dtypes import DType
from attnc.model.schedule import TileConfig
from attnc.plan.device import Device
from attnc.plan.ir import OutputKernel
from attnc.plan.layout import DeviceMemory, KernelName, Traffic
from attnc.plan.picture import Picture

#: Bytes that one asynchronous copy moves and one row of an ldmatrix piece has: a chunk.
CHUNK_BYTES = 16
#: Head dimensions are multiples of it: the width of an mma, and elements of 16 bits in a chunk.
GRANULE = 8
#: Why rows of another size are refused.
UNALIGNED_ROWS = "rows are copied in pieces of 16 bytes"
#: Floats between the rows of a partial product, so that those of a fragment lie in different banks.
PADDING = 8
#: Rows of an mma; with 16-bit operands also its depth.
MMA = 16


def round_up_depth(size: int) -> int:
    """Returns how many columns products have of so many that rows have in memory: whole depths of an mma."""
    return -(-size // MMA) * MMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Swizzle:
    """A tile in shared memory: rows of `width` elements, whose 16-byte chunks of `chunk` elements are
    permuted within the row.

    Chunk c of row r lies at `c ^ (r // span % period)`: any 8 consecutive rows have the chunk in 8
    different groups of banks, which makes ldmatrix and the copies conflict-free."""

    width: int
    chunk: int

    @property
    def chunks(self) -> int:
        return self.width // self.chunk

    @property
    def panels(self) -> int:
        return self.chunks // 8

    @property
    def period(self) -> int:
        return gcd(self.chunks, 8)

    @property
    def span(self) -> int:
        return 8 // self.period


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayout:
    """arch: the oldest architecture it compiles for, "sm_80". element: of q, k, v. d, dv: head dimensions,
    the columns of rows as they are stored; qk, v: the tiles of Q and K, and of V, at least as wide as they
    are multiplied (`d_multiplied`, `dv_multiplied`).

    warp_split: "q", a warp has rows of the query tile and walks over all keys (FlashAttention-2); "kv", a
    warp has keys of every tile and all query rows, and the partial products are summed through shared
    memory (FlashAttention-1). exchange: columns of o that one such exchange sums. streamed: what the inner
    loop copies, through `stages` buffers: "kv" tiles, or "q" tiles past one that stays. v_in_k: the values
    are the first columns of the keys, and have no tile of their own. merge: when split-K sums: at
    every step, or once, each warp having its own maximum, sums and copies until then (decoding)."""

    arch: str
    element: DType
    d: int
    dv: int
    qk: Swizzle
    v: Swizzle
    warp_split: Literal["q", "kv"]
    streamed: Literal["q", "kv"]
    exchange: int = 0
    v_in_k: bool = False
    merge: Literal["step", "end"] = "step"

    @property
    def d_multiplied(self) -> int:
        return round_up_depth(self.d)

    @property
    def dv_multiplied(self) -> int:
        """Columns of v and o in products; those of o past dv are not stored."""
        return round_up_depth(self.dv)

    @property
    def split_columns(self) -> int:
        return self.dv

    @property
    def joining_blocks(self) -> str:
        """How many blocks join splits."""
        return "rows"

    @property
    def is_padded(self) -> bool:
        return (self.d, self.dv) != (self.d_multiplied, self.dv_multiplied)

    @property
    def is_f32(self) -> bool:
        return self.element is DType.F32

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes; an mma is two chunks deep."""
        return chunk_of(self.element)

    def chosen(self, config: TileConfig) -> dict[str, int]:
        """Returns no numbers: a launch has to know nothing of what the layout chooses."""
        return {}

    def threads(self, config: TileConfig) -> int:
        return 32 * config.warps

    def shared_memory(self, config: TileConfig) -> dict[str, int]:
        tile_q, tile_kv, stages = config.tile_q, config.tile_kv, config.stages
        warps = config.warps
        size = self.element.bytes
        if self.streamed == "kv":
            buffers = {
                "q": tile_q * max(self.qk.width, self.v.width) * size,
                "k": stages * tile_kv * self.qk.width * size,
                "v": stages * tile_kv * self.v.width * size,
            }
        else:
            buffers = {
                "q": stages * tile_q * self.qk.width * size,
                "k": tile_kv * self.qk.width * size,
                "v": tile_kv * self.v.width * size,
            }
        if self.v_in_k:
            del buffers["v"]
        if self.warp_split == "kv":
            partial = warps * tile_q * (self.exchange + PADDING) * 4
            statistics = (2 * warps + 1) * tile_q * 4
            if self.merge == "end":  # in the place of the tiles
                tiles = buffers["k"] + buffers.get("v", 0)
                statistics = max(0, partial + statistics - tiles)
            else:
                buffers["partial"] = partial
            if statistics:
                buffers["statistics"] = statistics
        return buffers

    def registers(self, config: TileConfig) -> dict[str, int]:
        tile_q, tile_kv, warps = config.tile_q, config.tile_kv, config.warps
        threads = 32 * warps
        columns = self.v.width
        if self.warp_split == "kv":
            columns = columns * warps if self.merge == "end" else columns + self.exchange * warps
        scores = tile_q * tile_kv // threads
        small = {"small": scores} if self.is_f32 else {}  # what the small parts of operands add, or are
        return {"acc": tile_q * columns // threads, "s": scores, **small}


def chunk_of(element: DType) -> int:
    """Returns how many elements 16 bytes hold."""
    return CHUNK_BYTES // element.bytes


# --- the kernels of a backward


#: Columns of dk, and of dv, of a block where several share them; of dq twice as many.
SLICE = 128
#: Keys of a warp where several share them: two rows of fragments use each operand twice.
SHARED_KEYS = 32
#: Rows of the scores that a warp makes where values are in the keys.
LATENT_ROWS = MMA


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBackwardLayout:
    """layout: of the tiles, as in the forward. exchange: warps share keys; adds_dq: the kernel for dk and dv
    adds to dq; sums: there are gradients of what the score reads beside q and k; reads_rows: kernels read lse
    and delta of each row, as none does of weights without a softmax. sliced: several blocks make the scores
    of a tile, and each some columns of its gradients, which are too many for the registers of one.
    breaks_sticks: warps tell each other what keys of stick-breaking leave and give.

    Where values are in the keys (`layout.v_in_k`), warps share scores by rows and columns, show each other p
    and ds, and each sums some columns of the one gradient, which a product of p and one of ds add to.
    """

    layout: CudaLayout
    exchange: bool
    adds_dq: bool
    sums: bool
    sliced: bool = False
    reads_rows: bool = True
    breaks_sticks: bool = False

    @property
    def shares_heads(self) -> bool:
        """Whether blocks may share the query heads of a kv tile, whose sums another kernel adds in order: in
        kernels that run longest of all, and sum nothing else.
        """
        return self.layout.v_in_k or (self.breaks_sticks and not (self.sums or self.sliced))

    @property
    def joined_rows(self) -> int:
        return 0

    def slices(self, kernel: KernelName) -> int:
        widest = max(self.layout.qk.width, self.layout.v.width)
        return -(-widest // (2 * SLICE if over_rows(kernel) else SLICE)) if self.sliced else 1

    def slice_of(self, width: int, kernel: KernelName) -> int:
        return round_up_depth(-(-width // self.slices(kernel)))

    def parts(self, config: TileConfig, kernel: KernelName = "dkdv") -> int:
        if self.layout.v_in_k:
            return LATENT_ROWS * config.warps // (config.tile_q if over_rows(kernel) else config.tile_kv)
        if not self.exchange:
            return 1
        return config.warps * SHARED_KEYS // config.tile_kv

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        tile_q, tile_kv, stages = config.tile_q, config.tile_kv, config.stages
        warps, size = config.warps, self.layout.element.bytes
        d, dv = self.layout.qk.width * size, self.layout.v.width * size
        if self.layout.v_in_k:
            return self._shared_memory_of_latents(config, kernel)
        if over_rows(kernel):
            buffers = {
                "q": tile_q * d,
                "do": tile_q * dv,
                "k": stages * tile_kv * d,
                "v": stages * tile_kv * dv,
            }
            return {**buffers, "sums": warps * 4} if self.sums else buffers
        buffers = {
            "k": tile_kv * d,
            "v": tile_kv * dv,
            "q": stages * tile_q * d,
            "do": stages * tile_q * dv,
        }
        if self.exchange or self.adds_dq:
            buffers["ds"] = tile_q * tile_kv * size
        if self.exchange:
            buffers["p"] = tile_q * tile_kv * size
        if self.reads_rows:
            buffers["rows"] = stages * 2 * tile_q * 4
        if self.breaks_sticks:
            buffers["sticks"] = 2 * warps * tile_q * 4
        if self.sums:
            buffers["sums"] = (warps + self.parts(config) * tile_kv) * 4
        return buffers

    def _shared_memory_of_latents(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        tile_q, tile_kv, size = config.tile_q, config.tile_kv, self.layout.element.bytes
        of_q, of_kv = (1, config.stages) if over_rows(kernel) else (config.stages, 1)
        buffers = {
            "k": of_kv * tile_kv * self.layout.qk.width * size,
            "q": of_q * tile_q * self.layout.qk.width * size,
            "do": of_q * tile_q * self.layout.v.width * size,
            "ds": tile_q * tile_kv * size,
        }
        of_keys = {"p": tile_q * tile_kv * size, "rows": config.stages * 2 * tile_q * 4}
        return buffers if over_rows(kernel) else buffers | of_keys

    def columns_of_latents(self, config: TileConfig, kernel: KernelName) -> int:
        rows = config.tile_q if over_rows(kernel) else config.tile_kv
        shares = max(config.warps * self.rows_of_latents(config, kernel) // rows, 1)
        return round_up_depth(-(-self.layout.qk.width // shares))

    def rows_of_latents(self, config: TileConfig, kernel: KernelName) -> int:
        return LATENT_ROWS if over_rows(kernel) or config.tile_kv % SHARED_KEYS else SHARED_KEYS

    def walks_for_each(self, kernel: KernelName) -> int:
        return 0

    def registers(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        tile_q, tile_kv = config.tile_q, config.tile_kv
        threads = 32 * config.warps
        d, dv = (self.slice_of(x.width, kernel) for x in (self.layout.qk, self.layout.v))
        acc = tile_q * d if over_rows(kernel) else tile_kv * (d + dv)
        if self.layout.v_in_k:
            of_warp = self.rows_of_latents(config, kernel) * self.columns_of_latents(config, kernel)
            acc = of_warp * config.warps
        scores = tile_q * tile_kv // threads
        small = {"small": scores} if self.layout.is_f32 else {}  # of operands in two parts, and what they add
        sticks = {"p": scores, "shares": scores} if self.breaks_sticks else {}
        return {"acc": acc // threads, "s": scores, "ds": scores, **small, **sticks}


def over_rows(kernel: KernelName) -> bool:
    """Returns whether the kernel has a block of threads per q tile."""
    return kernel in ("dq", "dq_kept", "rows")


_F32 = 4
#: Bytes of shared memory that the system keeps in every block.
_RESERVED = 1024


def traffic(kernel: OutputKernel, layout: CudaLayout, config: TileConfig, tiles: Picture) -> Traffic:
    """Returns the bytes of one head, for the tiles that `tiles` says are visited."""
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
    """Returns the bytes of q, k, v, o and lse once; all that is asked for where the L2 cache does not hold
    what FlashAttention-1 carries between visits, for the heads that run at once.
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
    if layout.warp_split != "kv" or layout.merge == "end":  # at the end it is little beside the tiles
        return 0, 0
    tile_q, warps, v = config.tile_q, config.warps, layout.v.width
    row = tile_q * _F32
    # The maxima of all warps; FlashAttention-1 also needs the sums in every step.
    statistics = 2 if kernel.softmax.rescale == "every_step" else 1
    partial = warps * row * v
    read = partial + statistics * warps * warps * row + v // layout.exchange * row
    return read, partial + statistics * warps * row + row
