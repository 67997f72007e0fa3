"""Targets that a schedule may name, and what their makers and other compilers call them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from attnc.diagnostics import did_you_mean

TARGETS = (
    "triton",
    *(f"cuda.sm_{arch}" for arch in ("80", "86", "89", "90", "90a", "100", "100a", "120")),
)
#: The target of CUDA whose kernels run on all later GPUs.
_OLDEST = "cuda.sm_80"
#: GPUs, their generations and vendors: the target that runs there and what else to know of it.
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("hopper", "h100", "h200", "gh200", "wgmma"), "cuda.sm_90a"),
    **dict.fromkeys(
        ("ampere", "a100", "a10", "ada", "l4", "l40", "l40s", "rtx4090", "cuda", "nvidia"), "cuda.sm_80"
    ),
    **dict.fromkeys(("blackwell", "b100", "b200", "gb200", "rtx5090", "gpu", "python", "openai"), "triton"),
    **dict.fromkeys(("cpu", "interpreter", "x86"), "triton"),
    **dict.fromkeys(("amd", "rocm", "hip", "mi300", "mi300x"), "triton"),
}
_BESIDE: Mapping[str, str] = {
    "cuda": ", or 'cuda.sm_90a' for Hopper",
    "nvidia": ", or 'cuda.sm_90a' for Hopper",
    **dict.fromkeys(("cpu", "interpreter", "x86"), ", whose kernels are interpreted where there is no GPU"),
    **dict.fromkeys(("amd", "rocm", "hip", "mi300", "mi300x"), ", though no AMD GPU has been tried"),
}
_ARCHITECTURE = re.compile(r"(?:cuda|ptx|sm|compute|cc)?[._]*(?:sm|compute)?[._]*([0-9]+a?)")


def suggest_target(name: str, known: Collection[str] = TARGETS) -> tuple[str, ...]:
    """Returns the hint about a target that there is not: what it is called here, or what is close."""
    plain = name.lower().replace("-", "")
    wanted = _ELSEWHERE.get(plain, "")
    if found := _ARCHITECTURE.fullmatch(plain):
        arch = "90a" if found[1] == "90" else found[1]  # kernels for Hopper need what 90a alone has
        wanted = f"cuda.sm_{arch}"
        number = int(found[1].rstrip("a"))
        if wanted not in known and _OLDEST in known and 80 <= number < 1000:
            hopper = "'cuda.sm_90a' for Hopper, or " if 90 <= number < 100 else ""
            return (f"write {hopper}'{_OLDEST}', whose kernels run on later GPUs too",)
    if wanted in known:
        return (f"write '{wanted}'{_BESIDE.get(plain, '')}",)
    return did_you_mean(name, known)
