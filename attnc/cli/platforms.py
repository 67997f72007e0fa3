"""Where kernels run: what has been tested, what is expected to work, and what does not, by GPU and system."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Literal, TypeAlias

from attnc.plan.targets import TARGETS

State: TypeAlias = Literal["tested", "expected", "no"]

#: One target of each family; `cuda.sm_86` and its like are `cuda.sm_80` for one architecture.
FAMILIES = ("triton", "cuda.sm_80", "cuda.sm_90a")
#: Compute capabilities of GPUs that have records in generated/verified.json.
_TESTED = frozenset((90,))
#: GPUs by generation, with the compute capability of each.
GPUS: Mapping[str, int] = {
    "Turing (T4, RTX 20) and older, sm_75": 75,
    "Ampere (A100), sm_80": 80,
    "Ampere (A10, RTX 30), sm_86": 86,
    "Ada (L4, L40, RTX 40), sm_89": 89,
    "Hopper (H100, H200), sm_90": 90,
    "Blackwell (B200), sm_100": 100,
    "Blackwell (RTX 50), sm_120": 120,
}
#: Systems: what GPUs and what the CPU does there.
SYSTEMS: Mapping[str, tuple[str, str]] = {
    "Linux, x86-64": ("tested", "tested: Triton interpreted, CUDA C++ simulated"),
    "WSL 2": ("expected, as on Linux", "expected, as on Linux"),
    "Linux, Arm (GH200)": ("expected", "expected"),
    "Windows, macOS": ("no", "check, compile and explain; kernels are simulated on Linux"),
    "AMD GPUs (ROCm)": ("no: nobody has tried", "as above"),
}


def state_of(target: str, capability: int) -> State:
    """Returns the state of a target on GPUs of this compute capability, 90 for sm_90."""
    if not TARGETS[target].runs_on(capability):
        return "no"
    return "tested" if capability in _TESTED else "expected"


def system_here() -> str:
    """Returns the row of `SYSTEMS` for this machine, but for its GPUs."""
    if sys.platform != "linux":
        return "Windows, macOS"
    if "microsoft" in platform.release().lower():
        return "WSL 2"
    return "Linux, Arm (GH200)" if platform.machine() == "aarch64" else "Linux, x86-64"
