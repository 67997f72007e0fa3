"""DTensors as shards of rows: what of one is this rank's, and results that lie as it does.

Along the axis of the group's ranks q, k and v are sharded by their rows. Along other axes of the mesh they
may be sharded by sequences or heads, or be whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from attnc.distributed.group import Group, Ranks
from attnc.model.tensors import Role, Tensor


def is_dtensor(x: Any) -> bool:
    """Returns whether it is one; who has one has imported what they are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def whole_shape(x: Any, tensor: Tensor) -> torch.Size:
    """Returns the shape of q or k for a group of ranks: all of its rows, and its share of sequences and
    heads.
    """
    if not is_dtensor(x):
        return torch.Size(x.shape)
    sizes = list(x.to_local().shape)
    axis = _row_axis(tensor)
    sizes[axis] = x.shape[axis]
    return torch.Size(sizes)


def local(x: Any, tensor: Tensor, group: Ranks) -> torch.Tensor:
    """Returns this rank's part of a tensor; gradients flow back. Raises ValueError where it lies
    otherwise.
    """
    if not is_dtensor(x):
        return x  # type: ignore[no-any-return]  # a tensor
    at, axis = _axis_of(x, group, tensor.name), _row_axis(tensor)
    for number, placement in enumerate(x.placements):
        if number == at and not placement.is_shard(axis):
            raise ValueError(
                f"{tensor.name}: expected Shard({axis}), by rows, over the ranks that share them, "
                f"got {placement}"
            )
        if number != at and (placement.is_partial() or placement.is_shard(axis)):
            raise ValueError(
                f"{tensor.name}: expected Replicate(), or a shard of sequences or heads, over other axes of "
                f"the mesh, got {placement}"
            )
    part: torch.Tensor = x.to_local()
    return part


def local_input(x: Any, name: str, group: Ranks) -> torch.Tensor:
    """Returns an input that every rank of the group has whole."""
    if not is_dtensor(x):
        return x  # type: ignore[no-any-return]  # a tensor, or a number
    placement = x.placements[_axis_of(x, group, name)]
    if not placement.is_replicate():
        raise ValueError(f"{name}: expected Replicate() over the ranks that share rows, got {placement}")
    part: torch.Tensor = x.to_local()
    return part


def like(q: Any, of: Tensor, o: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """Returns o, or lse, of this rank as a DTensor that lies as q does; as it is, where q is none. of: what q
    is.
    """
    if not is_dtensor(q):
        return o
    from torch.distributed.tensor import DTensor, Shard

    placements = [
        Shard(tensor.roles.index(of.roles[placement.dim])) if placement.is_shard() else placement
        for placement in q.placements
    ]
    whole: dict[Role, int] = {
        role: size for role, size in zip(of.roles, q.shape, strict=True) if role is not Role.FEATURE
    }
    shape = [whole.get(role, size) for role, size in zip(tensor.roles, o.shape, strict=True)]
    strides = torch.empty(shape, device="meta").stride()
    made: torch.Tensor = DTensor.from_local(
        o, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return made


def _row_axis(tensor: Tensor) -> int:
    return tensor.roles.index(Role.KEY if Role.KEY in tensor.roles else Role.QUERY)


def _axis_of(x: Any, group: Ranks, name: str) -> int:
    mesh = x.device_mesh
    if isinstance(group, Group):
        if group.axis and group.axis in (mesh.mesh_dim_names or ()):
            return int(mesh.mesh_dim_names.index(group.axis))
        members = dist.get_process_group_ranks(group.group)
        ranks = [dist.get_process_group_ranks(mesh.get_group(number)) for number in range(mesh.ndim)]
        if members in ranks:
            return ranks.index(members)
    raise ValueError(f"{name}: no axis of its mesh is the group of ranks that share rows")
