"""What the mask function for transformers hands to the attention function: a band, carried by a tensor that
models pass on and nothing computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._guards import TracingContext

#: The attribute of a carrier.
BAND = "attnc_band"
#: What models and PyTorch do with a mask that they pass on: look at it, move it, and cut it to the keys that
#: there are. (`__set__`: reentrant checkpoints say that a copy requires no gradient.)
_LOOKS = frozenset((
    "__get__", "__len__", "__repr__", "__set__", "dim", "element_size", "get_device", "is_contiguous",
    "is_floating_point", "numel", "size", "stride",
))  # fmt: skip
_MOVES = frozenset(("cpu", "cuda", "to"))
_KEEPS = frozenset(("__getitem__", "clone", "contiguous", "detach", "requires_grad_", "type"))


@dataclass(frozen=True, slots=True)
class Band:
    """Row q_idx of M sees the keys first[b] .. last[b] - 1, at most `left` before and `right` after
    q_pos = q_idx + stop[b] - M, None for all. first, last, stop: i32[B]. keys: bool[B, N], which of them
    besides; None: all.
    """

    first: torch.Tensor
    last: torch.Tensor
    stop: torch.Tensor
    left: int | None
    right: int | None
    keys: torch.Tensor | None = None

    def to(self, device: torch.device) -> Band:
        first, last, stop = (x.to(device) for x in (self.first, self.last, self.stop))
        keys = None if self.keys is None else self.keys.to(device)
        return replace(self, first=first, last=last, stop=stop, keys=keys)


class Carrier(torch.Tensor):
    """A tensor of no meaning with a band. RuntimeError where something computes with it: the attention of a
    model that does not go through transformers' interface, which would take it for a mask.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        is_known = isinstance(first, cls) and name in _LOOKS | _MOVES | _KEEPS
        # The compiler asks for more than a model does.
        if not (is_known or torch.compiler.is_compiling() or TracingContext.try_get() is not None):
            raise RuntimeError(
                "attnc: this model computes its attention by itself, not by the function that transformers"
                " calls by the name of attn_implementation: load it with 'eager' or 'sdpa'"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if not is_known or name in _LOOKS or not isinstance(found, torch.Tensor):
                return found
            band: Band = getattr(first, BAND)
            return carry(band.to(found.device) if name in _MOVES else band, tuple(found.shape))


def carry(band: Band, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of this shape, without memory of its size, that carries a band. In a graph of
    torch.compile it is an ordinary one, of NaN, so that what adds it to scores is seen to fail.
    """
    made = torch.full((), torch.nan, dtype=torch.float32, device=band.first.device).expand(shape)
    if not torch.compiler.is_compiling():
        made = made.as_subclass(Carrier)
    setattr(made, BAND, band)
    return made
