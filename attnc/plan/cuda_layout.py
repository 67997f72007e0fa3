"""How a CUDA kernel of the `mma.sync` family lies on the machine: fragments, shared memory, work of a warp.

The unit is mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane = 4 g + t holds rows g and g +
8 and columns 2t, 2t + 1 of every 16 x 8 piece of an accumulator. Two neighbouring pieces of S, rounded to
16 bits, are one 16 x 16 piece of the left operand P, so that P never leaves registers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from attnc.model.schedule import Config
from attnc.model.tensors import DType

#: Elements of the 16 bytes that one asynchronous copy moves and one row of an ldmatrix piece has.
CHUNK = 8
#: Floats between the rows of a partial product, so that those of a fragment lie in different banks.
PADDING = 8
#: Rows and depth of an mma; its width is CHUNK.
MMA = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Swizzle:
    """A tile in shared memory: rows of `width` elements, whose 16-byte chunks are permuted within the row.

    Chunk c of row r lies at `c ^ (r // span % period)`: any 8 consecutive rows have the chunk in 8
    different groups of banks, which makes ldmatrix and the copies conflict-free."""

    width: int

    @property
    def chunks(self) -> int:
        return self.width // CHUNK

    @property
    def period(self) -> int:
        return gcd(self.chunks, 8)

    @property
    def span(self) -> int:
        return 8 // self.period


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayout:
    """arch: the oldest architecture it compiles for, "sm_80". element: of q, k, v. d, dv: head dimensions;
    qk, v: the tiles of Q and K, and of V, whose widths are d and dv rounded up to the depth of an mma.

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

    def threads(self, config: Config) -> int:
        return 32 * integer(config, "warps")

    def shared_memory(self, config: Config) -> dict[str, int]:
        """Bytes of shared memory by buffer, in the kernel's order."""
        tile_q, tile_kv, stages = (integer(config, key) for key in ("tile.q", "tile.kv", "stages"))
        warps = integer(config, "warps")
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

    def registers(self, config: Config) -> dict[str, int]:
        """32-bit registers of a thread by value, those that live through a step."""
        tile_q, tile_kv, warps = (integer(config, key) for key in ("tile.q", "tile.kv", "warps"))
        threads = 32 * warps
        columns = self.v.width
        if self.warp_split == "kv":
            columns = columns * warps if self.merge == "end" else columns + self.exchange * warps
        return {"acc": tile_q * columns // threads, "s": tile_q * tile_kv // threads}


def integer(config: Config, key: str) -> int:
    """The value of a numeric key."""
    value = config[key]
    if not isinstance(value, int):
        raise ValueError(f"{key} = {value!r} is not a number")
    return value
