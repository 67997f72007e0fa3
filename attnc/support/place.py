"""What launches are prepared for: sizes, and tensors without addresses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .arguments import Tensor
from .devices import Gpu
from .memory import Memory, contiguous

#: The tensor that workspaces of a backward lie in, and the bytes that the start of each is a multiple of.
_WORKSPACE, _APART = "_workspace", 256


class Place(NamedTuple):
    """What launches are prepared for: sizes, strides and configs by name, layouts by tensor, the order of
    the tensors that launches are given, and the device. results: the tensors that they write. behind:
    tensors that lie in another one, so many bytes behind its start.
    """

    names: Mapping[str, Any]
    memories: Mapping[str, Memory]
    declared: Mapping[str, Tensor]
    order: Sequence[str]
    results: Sequence[str]
    gpu: Gpu
    device: torch.device
    behind: Mapping[str, tuple[str, int]] = MappingProxyType({})

    def positions(self, tensors: Iterable[str]) -> list[int]:
        """Looks up where these are among what launches are given; -1, that of None, for what is not there."""
        at = {name: i for i, name in enumerate(self.order)}
        at |= {name: at[owner] for name, (owner, _) in self.behind.items()}
        return [at[name] if name in self.memories else -1 for name in tensors]

    def with_memories(self, memories: Mapping[str, Memory]) -> "Place":
        """Returns the place with these layouts, and their strides by name: 0 for tensors not given, and for
        axes of size 1.
        """
        names = dict(self.names)
        for name, tensor in self.declared.items():
            memory = memories.get(name)
            strides = (0,) * len(tensor.stride_names) if memory is None else memory.steps
            names.update(zip(tensor.stride_names, strides, strict=False))
        return self._replace(names=names, memories=memories)


def join_workspaces(
    names: Sequence[str], memories: Mapping[str, Memory]
) -> tuple[Mapping[str, tuple[str, int]], dict[str, Memory]]:
    """Returns which of these tensors lie in one workspace, as `Place.behind` has it, and its layout by name:
    an allocation takes as long as half a launch.
    """
    if len(names) < 2:
        return {}, {}
    behind, end = {}, 0
    for name in names:
        shape, _, dtype = memories[name]
        behind[name] = (_WORKSPACE, end)
        end += -(-math.prod(shape) * dtype.itemsize // _APART) * _APART
    return behind, {_WORKSPACE: contiguous((end // 4,), torch.float32)}
