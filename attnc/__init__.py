"""attnc: a compiler from short `.attn` specs to readable, verified attention kernels.

    import attnc
    causal = attnc.compile("causal.attn")    # a path, or the text itself
    o = causal(q, k, v)

Everything is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnc.version import __version__

if TYPE_CHECKING:
    from attnc import flex
    from attnc.api.compile import Cache, Spec, SpecError, SpecWarning
    from attnc.api.family import Family

__all__ = ["Family", "SpecError", "SpecWarning", "__version__", "compile", "flex"]


def compile(
    source: Spec,
    *,
    target: str | None = None,
    attention: str | None = None,
    deterministic: bool = True,
    cache: Cache = True,
) -> Family:
    """Compiles a spec and returns its function.

    source: a path, or the text of a spec: a string with a line break or a brace
    target: "triton", "cuda.sm_80" or "cuda.sm_90a". By default the fastest that the current GPU runs; if the
        spec has schedules for the attention, the fastest of their targets. A target without a schedule gets
        a default one, and without gradients another for few queries; `Family.spec` shows them
    attention: the name of the one to compile, in a spec that declares several
    deterministic: whether gradients have the same bits in every run. It applies to default schedules alone:
        False lets them take the fastest way
    cache: where compiled kernels are kept. True: in the user's cache folder ($ATTNC_CACHE_DIR), for all
        processes. A path: in that folder, which nobody else may be able to write to. False: for this process

    Without a GPU the kernels run on the CPU, slowly: Triton's in its interpreter, CUDA's in a simulator.

    Raises SpecError for a wrong spec, with the text that `attnc check` prints; ValueError for a target,
    attention or other choice that does not exist; OSError or PermissionError for files and folders. Warns
    with SpecWarning where a spec is valid but doubtful.
    """
    from attnc.api.compile import compile_family

    return compile_family(
        source, target=target, attention=attention, deterministic=deterministic, cache=cache, steps=True
    )


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {
        "Family": "attnc.api.family",
        "SpecError": "attnc.api.compile",
        "SpecWarning": "attnc.api.compile",
    }
    if name in homes:
        return getattr(import_module(homes[name]), name)
    if name == "flex":
        return import_module("attnc.flex")
    raise AttributeError(f"module 'attnc' has no attribute '{name}'")
