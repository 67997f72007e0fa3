"""Attention over several GPUs: the distribution of scores, the data that moves, and the joining of partial
results.

The host plans with integers alone (`spans`, `offers`, `plan`), from the same closed forms that make a
kernel's loops; `derive` writes the spec of what one rank computes; `engine` runs it on torch.distributed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnc.distributed.decode import SpreadKeys
    from attnc.distributed.engine import ContextParallel

__all__ = ["ContextParallel", "SpreadKeys"]


def __getattr__(name: str) -> Any:
    if name == "ContextParallel":  # plans are made where there is no torch
        from attnc.distributed.engine import ContextParallel

        return ContextParallel
    if name == "SpreadKeys":
        from attnc.distributed.decode import SpreadKeys

        return SpreadKeys
    raise AttributeError(f"module 'attnc.distributed' has no attribute {name!r}")
