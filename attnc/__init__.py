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
    """Compiles a spec, and returns its function.

    source: a path, or the text of a spec (a string with a line break or a brace)
    target: "triton", "cuda.sm_80", ...; by default the fastest that the current GPU runs, of those that the
        attention has schedules for where it has some. One without a schedule for the target gets one:
        `Family.spec` shows it
    attention: which one, in a spec that declares several
    deterministic: whether gradients under a schedule that is made here are the same bits in every run; False
        takes the fastest
    cache: True keeps what is compiled in the user's cache folder ($ATTNC_CACHE_DIR), for all processes; a
        path in another folder, of which this user must be the only one to write to; False for this process

    Without a GPU the kernels run on the CPU, slowly: Triton's by its interpreter, CUDA's thread by thread.
    Raises SpecError (its text is what `attnc check` prints) for a wrong spec, ValueError for a choice that
    there is not, OSError and PermissionError for files and folders; warns of a doubtful spec (SpecWarning).
    """
    from attnc.api.compile import compile_family

    return compile_family(
        source, target=target, attention=attention, deterministic=deterministic, cache=cache
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
