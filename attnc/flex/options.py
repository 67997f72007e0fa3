"""torch's kernel_options as schedule keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = {"BLOCK_M": "tile.q", "BLOCK_N": "tile.kv", "num_warps": "warps", "num_stages": "stages"}
#: Options of torch's kernels that change no result and mean nothing here: how masks and scales are computed,
#: which of its kernels runs, and tiles of its backward.
_WITHOUT_EFFECT = frozenset((
    "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "OUTPUT_LOGSUMEXP",
    "FORCE_USE_FLEX_ATTENTION", "FORCE_FLEX_ATTENTION", "USE_TMA", "BACKEND", "IS_DIVISIBLE",
    "SAFE_M_BOUNDARY", "SAFE_N_BOUNDARY", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2",
    "kpack", "matrix_instr_nonkdim", "waves_per_eu", "SM_SCALE", "GQA_SHARED_HEADS",
))  # fmt: skip


def read_options(options: Mapping[str, Any] | None) -> tuple[tuple[str, int], ...]:
    """(schedule key, value) of the options that choose tiles. ValueError for one that torch does not have."""
    wanted = {}
    for name, value in (options or {}).items():
        plain = name.removeprefix("fwd_")
        if plain in _KEYS:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"kernel_options: {name}: expected an integer, got {value!r}")
            wanted[_KEYS[plain]] = value
        elif plain.removeprefix("bwd_") not in (*_WITHOUT_EFFECT, *_KEYS):
            raise ValueError(f"kernel_options: {name}: expected one of {', '.join(_KEYS)}, got {name}")
    return tuple(sorted(wanted.items()))
