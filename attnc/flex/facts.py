"""What is true of the integers in a captured tensor: looked at once, while the tensor stays as it is.

That a tensor ascends lets kernels find the keys of a document by binary search instead of comparing all, and
that its values are not negative spares indices the test for counting from the end. Finding out waits for the
device; what was found is remembered with the tensor and its version, so layers that share a tensor, and calls
that change nothing, do not wait again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Facts(NamedTuple):
    """is_sorted: ascending along the last axis; natural: no value is negative."""

    is_sorted: bool = False
    natural: bool = False


NOTHING = Facts()
_KNOWN: dict[tuple[object, ...], tuple[weakref.ref[torch.Tensor], int, Facts]] = {}


def facts_of(tensor: torch.Tensor) -> Facts:
    """Facts of an integer tensor; none where it cannot be looked at: without data, in a captured graph."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return NOTHING
    owner = tensor if tensor._base is None else tensor._base  # views are made anew, what they show is not
    key = (id(owner), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    version = -1 if tensor.is_inference() else tensor._version
    known = _KNOWN.get(key)
    if known is not None and known[0]() is owner and known[1] == version:
        return known[2]
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return NOTHING
    found = _looked_at(tensor.detach())
    _KNOWN[key] = (weakref.ref(owner, lambda _: _KNOWN.pop(key, None)), version, found)
    return found


def _looked_at(tensor: torch.Tensor) -> Facts:
    if tensor.numel() == 0:
        return Facts(True, True)
    ascends = (
        (tensor[..., 1:] >= tensor[..., :-1]).all() if tensor.dim() else torch.ones((), dtype=torch.bool)
    )
    is_sorted, natural = torch.stack([ascends.to(tensor.device), (tensor >= 0).all()]).tolist()
    return Facts(bool(is_sorted), bool(natural))
