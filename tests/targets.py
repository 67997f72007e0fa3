"""The targets as tests ask for them: everything that a test wants to know of one, found by its name.

A family that lowers all that the language has gets a row in `_SMALL` and `_SMALL_DECODE`, hence in `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attnc.plan import targets
from attnc.runtime.toolchains import toolchain_of
from attnc.verify.runners import runner_of
from attnc.verify.simt import available

#: Tiles of which a few rows and keys are several, by family.
_SMALL: Mapping[str, str] = {
    "triton": "tile.q = 16, tile.kv = 16",
    "sm80": "tile.q = 32, tile.kv = 32, warps = 2",
}
#: The same for decode kernels.
_SMALL_DECODE: Mapping[str, str] = {
    "triton": "tile.kv = 16",
    "sm80": "tile.kv = 32, warps = 2, warp_split = kv",
}
#: The first name of each of these families.
TARGETS: tuple[str, ...] = tuple(
    next(target.name for target in targets.TARGETS.values() if target.family == family) for family in _SMALL
)
#: The same, those apart that a compiler makes for the CPU first: seconds for each kernel.
EACH = tuple(
    pytest.param(name, marks=pytest.mark.slow) if runner_of(name).warps_matter else name for name in TARGETS
)
WITHOUT_GXX = "g++ compiles CUDA kernels for the CPU"
needs_gxx = pytest.mark.skipif(not available(), reason=WITHOUT_GXX)


def small_tiles(target: str) -> str:
    """Tiles of a schedule, of which a few rows and keys are several."""
    return _SMALL[targets.target_of(target).family]


def small_decode_tiles(target: str) -> str:
    """The same for decode kernels."""
    return _SMALL_DECODE[targets.target_of(target).family]


def skip_without_compiler(target: str) -> None:
    """Ends the test where the target's kernels cannot run on the CPU."""
    if not runner_of(target).is_available():
        pytest.skip(WITHOUT_GXX)


def skip_without_launcher(target: str) -> None:
    """Ends the test where the target's kernels cannot be launched on a GPU."""
    package = toolchain_of(target).package
    pytest.importorskip(package, reason=f"{package} launches the kernels of {target}")
