"""An H200, and configs of which it can run some."""

from __future__ import annotations

from typing import NamedTuple

from attnc.support.devices import Gpu

H200 = Gpu(0, "NVIDIA H200", (9, 0), 232448, 233472, 132, 50 << 20, 1 << 37)


class Config(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    STAGES: int
    shared: int | tuple[tuple[int, int], ...]
    splits: int = 0
    maxnreg: int = 0


CONFIGS = (Config(128, 64, 8, 3, 300000), Config(64, 64, 4, 2, 90000), Config(64, 32, 4, 2, 40000))
