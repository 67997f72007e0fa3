"""Tensors of a call, checked one after the other."""

from __future__ import annotations

import pytest
import torch

from attnc.api.tensors import FLOATS, INTEGERS, GivenTensors, refuse_gradients, to_finite


def test_sizes_that_one_binds_the_next_ones_have() -> None:
    given = GivenTensors("door")
    given.check("q", torch.zeros(2, 5, 16), "B M D", FLOATS)
    given.check("ends", torch.zeros(3).int(), "B+1", INTEGERS)
    given.check("k", torch.zeros(2, 9, 16), "B _ 16", FLOATS)
    with pytest.raises(ValueError, match=r"door: v: expected shape \[2, any, 16, Dv\], got \[2, 9, 8, 4\]"):
        given.check("v", torch.zeros(2, 9, 8, 4), "B _ D Dv", FLOATS)
    given.check("v", torch.zeros(2, 9, 16, 7), "B _ D Dv", FLOATS)  # what was refused has bound nothing
    with pytest.raises(ValueError, match=r"door: v: expected Dv to be 8 \.\. 9, got 7"):
        given.check_range("v", "Dv", 8, 9)


@pytest.mark.parametrize(
    ("heads", "shared", "said"),
    [
        (4, 2, ""),
        (4, 3, "q: expected heads that are a multiple of the 3 of k, got 4"),
        (4, 0, "k: expected at least one head, got none"),
    ],
)
def test_heads_come_in_groups(heads: int, shared: int, said: str) -> None:
    given = GivenTensors()
    given.check("q", torch.zeros(heads), "H", FLOATS)
    given.check("k", torch.zeros(shared), "Hkv", FLOATS)
    if not said:
        given.check_groups("q", "k")
        return
    with pytest.raises(ValueError, match=said):
        given.check_groups("q", "k")


def test_types_and_what_they_follow_from() -> None:
    planned = GivenTensors("run", "as planned")
    with pytest.raises(TypeError, match=r"run: q: expected dtype torch.float16, as planned, got torch.int32"):
        planned.check("q", torch.zeros(2).int(), "T", (torch.float16,))
    with pytest.raises(
        TypeError, match=r"k: expected dtype torch.int32 or torch.int64, like q, got torch.bool"
    ):
        GivenTensors().check("k", torch.zeros(2).bool(), "T", INTEGERS, "like q")
    with pytest.raises(ValueError, match=r"ends: expected shape \[B \+ 1\], got \[0\]"):
        GivenTensors().check("ends", torch.zeros(0).int(), "B+1", INTEGERS)


def test_tensors_without_data_are_refused_unless_they_are_traced() -> None:
    with pytest.raises(ValueError, match="q: expected a tensor with data, got one on the device meta"):
        GivenTensors().check("q", torch.zeros(2, device="meta"), "T", FLOATS)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        GivenTensors().check("q", torch.zeros(2), "T", FLOATS)


def test_gradients_are_refused_where_they_are_wanted() -> None:
    leaf = torch.zeros(2).requires_grad_()
    with pytest.raises(RuntimeError, match="door: k: expected a tensor without gradients"):
        refuse_gradients("door", q=None, k=leaf)
    with torch.no_grad():
        refuse_gradients("door", k=leaf)


def test_torch_compile_traces_numbers_of_open_graphs_once() -> None:
    """It opens floats of modules too, and what depends on them is traced again."""
    traces: list[str] = []

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
    def note() -> None:
        traces.append("")

    def scale(x: torch.Tensor) -> torch.Tensor:
        note()
        return x * to_finite("scale", 0.3)

    compiled = torch.compile(scale, backend="aot_eager", dynamic=True, fullgraph=True)
    for length in (6, 9, 11):
        compiled(torch.ones(length))
    assert len(traces) == 1
