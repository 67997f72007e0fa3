"""Gradients of parts, summed to that of an input."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from attnc.support.arguments import Tensor
from attnc.support.gradients import Backward, Gradient, Made, Part, _DifferentiableOnce
from attnc.support.memory import memory_of


def test_parts_are_summed_over_what_an_input_lacks() -> None:
    names = {"M": 3, "N": 5}
    pair = torch.arange(2.0 * 4 * 8 * 5).reshape(2, 4, 8, 5)  # rows padded to 8
    over_batch = Part("x", ("q", "kv"), ("h", "q_idx", "kv_idx")).summing((4, 3, 5), names)(pair)
    assert torch.equal(over_batch, pair[:, :, :3].sum(0))
    turned = Part("x", ("q", "kv"), ("kv_idx", "h")).summing((5, 4), names)(pair)
    assert torch.equal(turned, pair[:, :, :3].sum((0, 2)).T)
    round_about = Part("x", ("q", "kv"), ("kv_idx", "h", "q_idx")).summing((5, 4, 3), names)(pair)
    assert torch.equal(round_about, pair[:, :, :3].sum(0).permute(2, 0, 1))
    tiles = torch.arange(2.0 * 4 * 6).reshape(2, 4, 6)
    assert torch.equal(Part("x", (), ("h",)).summing((4,), names)(tiles), tiles.sum((0, 2)))
    row = pair[..., 0]
    shifted = Part("x", ("q",), ("q_pos",)).summing((5,), names)(row)
    assert torch.equal(shifted, torch.cat([torch.zeros(2), row[:, :, :3].sum((0, 1))]))
    placed = Part("x", (), ("h", 1)).summing((4, 3), names)(tiles)
    assert torch.equal(placed[:, 1], tiles.sum((0, 2)))
    assert placed[:, 0].abs().sum() == 0
    assert Part("x", atomic=True).summing(row.shape, names)(row) is row


def test_workspaces_without_elements_are_not_allocated() -> None:
    """Those are for other sizes, and take a microsecond each. Gradients are, and what they are made of."""
    backward = Backward(
        configs={},
        tuned={},
        made=(Made("dk", like="k"), Made("dk_sum", type="f32[R, P]"), Made("dbias", type="f32[B, H, N]")),
        launches=(),
        gradients=(Gradient("k"), Gradient("bias", parts=(Part("dbias", ("kv",), ("h", "kv_idx")),))),
    )
    dk, sums, part = backward.made
    assert [backward.allocates(sums, shape) for shape in ((4, 2), (4, 0), (0, 2))] == [True, False, False]
    assert backward.allocates(dk, (0, 8))
    assert backward.allocates(part, (2, 3, 0))


def test_gradients_of_gradients_are_the_same_numbers_and_have_none() -> None:
    """Each in its place, and none where there is none."""
    given = [torch.ones(2, requires_grad=True), torch.ones(3)]
    for present in product((False, True), repeat=3):
        made = [torch.full((2,), float(at)) if there else None for at, there in enumerate(present)]
        marked = _DifferentiableOnce.mark("it", made, given)
        for before, after in zip(made, marked, strict=True):
            assert (before is None) == (after is None)
            assert before is None or after is None or torch.equal(before, after)
            if after is not None:
                with pytest.raises(RuntimeError, match=r"^it has no second derivative"):
                    after.sum().backward()  # type: ignore[no-untyped-call]  # torch's


def test_gradients_lie_as_their_inputs_but_for_packed_rows() -> None:
    backward = Backward(configs={}, tuned={}, made=(), launches=(), gradients=())
    x = torch.empty(2, 3, 5, 8).transpose(1, 2)  # rows of a head follow each other
    for type, axes, is_like in (("f32[B, N, H, 8]", "bnh", True), ("f32[T, N, H, 8]", "tnh", False)):
        tensor, made = Tensor("dk", type, axes), Made("dk", like="k")
        found = backward.lay(made, tensor, {"k": memory_of(x)}, {})
        assert found.shape == x.shape
        assert (found.strides == x.stride()) is is_like
    own = backward.lay(Made("sums", type="f32[M, 4]"), Tensor("sums", "f32[M, 4]"), {}, {"M": 3})
    assert own == memory_of(torch.empty(3, 4))
