"""DTensors as shards: what they lie like is checked, results lie as q does, and gradients flow through them.

On a mesh of one rank, which needs no other process; where rows lie on several is tested of slices.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attnc.distributed import ContextParallel
from attnc.distributed.dtensors import _axis_of
from attnc.distributed.group import Alone, Group
from attnc.verify.interpreter import ensure_interpreter
from tests.distributed.specs import SPECS

ensure_interpreter()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    folder = tmp_path_factory.mktemp("meeting")
    dist.init_process_group("gloo", init_method=(folder / "place").as_uri(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    dist.destroy_process_group()


def whole(narrow: int = 16) -> list[torch.Tensor]:
    """narrow: columns of v."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 32, *size, generator=generator) for size in ((2, 16), (1, 16), (1, narrow))]


def test_results_lie_as_q_does(mesh: DeviceMesh) -> None:
    """With as many columns as v has."""
    spec = SPECS["causal"].replace(
        "k, v: f32[B, N, Hkv, 16]", "k: f32[B, N, Hkv, 16]\n  input v: f32[B, N, Hkv, 8]"
    )
    spec = spec.replace("o: f32[B, M, Hkv * G, 16]", "o: f32[B, M, Hkv * G, 8]")
    one = ContextParallel(spec, Alone())
    leaves = [x.requires_grad_() for x in one.shard(*whole(8))]
    expected, expected_lse = one(*leaves)
    wanted = torch.autograd.grad(expected.sum(), leaves)

    cp = ContextParallel(spec, mesh["cp"])
    q, k, v = (distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_() for x in whole(8))
    assert cp.shard(q, k, v) == (q, k, v)
    o, lse = cp(q, k, v)
    assert isinstance(o, DTensor)
    assert o.placements == (Shard(0), Shard(1))
    assert lse.placements == (Shard(0), Shard(2))
    assert (o.shape, lse.shape) == (expected.shape, expected_lse.shape)
    found: Any = torch.autograd.grad(o.sum(), [q, k, v])
    for x, y in ((o, expected), (lse, expected_lse), *zip(found, wanted, strict=True)):
        assert torch.equal(x.full_tensor(), y)
    assert torch.equal(cp.unshard(o), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is symmetric memory")
def test_symmetric_memory_is_that_of_gpus(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="symmetric: expected GPUs of one host, got none"):
        ContextParallel(SPECS["causal"], mesh["cp"], symmetric=True)


def test_what_lies_otherwise_is_named(mesh: DeviceMesh) -> None:
    cp = ContextParallel(SPECS["documents"], mesh["cp"])
    q, k, v = (distribute_tensor(x, mesh, [Replicate(), Shard(1)]) for x in whole())
    doc = torch.zeros(1, 32, dtype=torch.int32)
    cp.plan(q, k, doc=distribute_tensor(doc, mesh, [Replicate(), Replicate()]))
    with pytest.raises(ValueError, match=r"^k: expected Shard\(1\), by rows, over the ranks that share them"):
        cp(q, distribute_tensor(whole()[1], mesh, [Replicate(), Replicate()]), v, doc)
    with pytest.raises(ValueError, match=r"^v: expected Replicate\(\), or a shard of sequences or heads"):
        cp(q, k, distribute_tensor(whole()[1], mesh, [Shard(1), Shard(1)]), doc)
    with pytest.raises(ValueError, match=r"^doc: expected Replicate\(\) over the ranks that share rows"):
        cp(q, k, v, doc=distribute_tensor(doc, mesh, [Replicate(), Shard(1)]))
    planned = ContextParallel(SPECS["causal"], mesh["cp"])
    planned.plan(*whole()[:2])
    with pytest.raises(ValueError, match="DTensors lie in slices, and the plan does not"):
        planned(q, k, v)


class Named(Group):
    """A group with the name of an axis, or none."""

    def __init__(self, axis: str, group: Any) -> None:
        self.axis, self.group = axis, group


def test_the_axis_of_ranks_is_that_of_its_name_or_of_its_members(mesh: DeviceMesh) -> None:
    """Of a mesh that calls it otherwise, of one without names, and of a group without one."""
    x: Any = SimpleNamespace(device_mesh=mesh)
    unnamed: Any = SimpleNamespace(device_mesh=DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int)))
    members = mesh.get_group("cp")
    for axis, of, expected in (
        ("cp", x, 1), ("dp", x, 0), ("ranks", x, 0), ("", x, 0), ("cp", unnamed, 0), ("", unnamed, 0)
    ):  # fmt: skip
        assert _axis_of(of, Named(axis, members), "q") == expected
    with pytest.raises(ValueError, match=r"^q: no axis of its mesh is the group of ranks that share rows"):
        _axis_of(x, Alone(), "q")
