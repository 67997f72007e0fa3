"""How the backward kernels of the `mma.sync` family lie on the machine.

Everything is transposed where keys are the outer axis: a warp of the kernel for dk and dv has rows of S^T and
dP^T, so that P^T and dS^T, rounded to 16 bits, are left operands of dV += P^T dO and dK += dS^T Q without
leaving registers. Where the accumulators are too wide for that, several warps share their keys (`exchange`):
each has some of the queries of P^T and dS^T, shows them to the others in shared memory, and has some of the
columns of dk and dv."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.model.schedule import TileConfig
from attnc.plan.layout import KernelName
from attnc.plan.sm80.layout import CudaLayout

#: Keys of a warp where several share them: two rows of fragments use each operand twice.
SHARED_KEYS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBackward:
    """layout: of the tiles, as in the forward. exchange: warps share keys; adds_dq: the kernel for dk and dv
    adds to dq; sums: there are gradients besides those of q, k and v.
    """

    layout: CudaLayout
    exchange: bool
    adds_dq: bool
    sums: bool

    @property
    def _columns(self) -> int:
        return self.layout.qk.width + self.layout.v.width

    def parts(self, config: TileConfig) -> int:
        """Warps that share their keys."""
        if not self.exchange:
            return 1
        return config.warps * SHARED_KEYS // config.tile_kv

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        """Bytes of shared memory of one kernel by buffer, in its order."""
        tile_q, tile_kv, stages = config.tile_q, config.tile_kv, config.stages
        warps, size = config.warps, self.layout.element.bytes
        d, dv = self.layout.qk.width * size, self.layout.v.width * size
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
        buffers["rows"] = stages * 2 * tile_q * 4
        if self.sums:
            buffers["sums"] = (warps + self.parts(config) * tile_kv) * 4
        return buffers

    def registers(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        """32-bit registers of a thread by value, those that live through a step."""
        tile_q, tile_kv = config.tile_q, config.tile_kv
        threads = 32 * config.warps
        acc = tile_q * self.layout.qk.width if over_rows(kernel) else tile_kv * self._columns
        scores = tile_q * tile_kv // threads
        small = {"small": scores} if self.layout.is_f32 else {}  # of operands in two parts, and what they add
        return {"acc": acc // threads, "s": scores, "ds": scores, **small}


def over_rows(kernel: KernelName) -> bool:
    """Whether the kernel has a block of threads per q tile."""
    return kernel in ("dq", "rows")
