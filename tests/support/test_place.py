"""Where tensors of a launch lie, some of them in one workspace."""

from __future__ import annotations

import torch

from attnc.support.arguments import Tensor
from attnc.support.memory import contiguous
from attnc.support.place import Place, join_workspaces
from tests.support.test_hopper_call import pretended


def test_workspaces_follow_each_other_at_multiples_of_256_bytes() -> None:
    memories = {
        "dq_sum": contiguous((3, 5), torch.float32),  # 60 bytes
        "delta": contiguous((128,), torch.float32),  # 512 bytes
        "lse2": contiguous((65,), torch.float32),  # 260 bytes
    }
    behind, made = join_workspaces(tuple(memories), memories)
    assert {name: start for name, (_, start) in behind.items()} == {"dq_sum": 0, "delta": 256, "lse2": 768}
    (owner,) = {name for name, _ in behind.values()}
    assert made == {owner: contiguous(((768 + 512) // 4,), torch.float32)}


def test_one_workspace_is_allocated_as_it_is() -> None:
    assert join_workspaces(("delta",), {"delta": contiguous((128,), torch.float32)}) == ({}, {})


def test_what_lies_in_another_tensor_has_its_position() -> None:
    memories = {name: contiguous((4, 8), torch.float32) for name in ("q", "delta", "workspace")}
    place = Place(
        {},
        memories,
        {},
        ("q", "k", "workspace"),
        (),
        pretended(),
        torch.device("cpu"),
        {"delta": ("workspace", 256)},
    )
    assert place.positions(("workspace", "delta", "q", "k")) == [2, 2, 0, -1]


def test_strides_of_tensors_that_are_not_given_are_0() -> None:
    declared = {name: Tensor(name, "f32[N, M]", "nm") for name in ("q", "k")}
    place = Place({}, {}, declared, ("q", "k"), (), pretended(), torch.device("cpu"))
    given = place.with_memories({"q": contiguous((4, 8), torch.float32)})
    assert {name: given.names[name] for name in ("stride_qn", "stride_kn")} == {
        "stride_qn": 8,
        "stride_kn": 0,
    }
