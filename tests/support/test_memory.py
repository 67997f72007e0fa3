"""Layouts of tensors, and memory that is made apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.support import memory
from attnc.support.memory import (
    allocate,
    contiguous,
    laid_like,
    lay_like,
    layouts_of,
    made_apart,
    make_picker,
    memory_of,
    share_elements,
)


def test_layouts_are_those_of_torch() -> None:
    for shape in ((2, 3, 4), (2, 0, 4), (), (1,)):
        made = contiguous(shape, torch.float32)
        assert made == memory_of(torch.empty(shape))
        (x,) = allocate([tuple(made)], torch.empty(()))  # type: ignore[list-item]  # a Layout
        assert memory_of(x) == made
    tensors = [torch.zeros(n, 2) for n in range(7)]
    for count in range(1, 8):
        flat = [part for x in tensors[:count] for part in (x.shape, x.stride(), x.dtype, x.device)]
        assert layouts_of(count)(tensors[:count]) == tuple(flat)
    assert make_picker([2])("abc") == ("c",)
    assert make_picker([2, -1])("abc") == ("c", "c")


LAID = {
    "contiguous": torch.empty(2, 3, 4, 8),
    "turned": torch.empty(2, 3, 4, 8).transpose(1, 2),
    "a part": torch.empty(2, 3, 3, 4, 8)[:, :, 1].transpose(1, 2),
    "expanded": torch.empty(2, 1, 4, 8).expand(2, 3, 4, 8),
    "one column": torch.empty(2, 3, 4, 1).transpose(0, 2),
    "columns apart": torch.empty(2, 3, 8, 4).mT,
}


@pytest.mark.parametrize("name", LAID)
def test_gradients_lie_as_torch_would_have_them(name: str) -> None:
    x = LAID[name]
    wanted = torch.empty_like(x)
    assert laid_like(memory_of(x), torch.float32, has_rows=False).strides == wanted.stride()
    rows = laid_like(memory_of(x), torch.float16, has_rows=True)
    assert rows.dtype == torch.float16
    assert rows.strides[-1] == 1 or x.shape[-1] == 1
    assert lay_like(wanted, x) is wanted
    other = torch.rand(x.shape)
    laid = lay_like(other, x)
    assert torch.equal(laid, other)
    assert memory_of(laid).steps == memory_of(wanted).steps


def test_what_is_made_apart_is_ordinary_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of inference mode, and waited for; what goes wrong is raised."""
    waits: list[torch.device] = []

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waits.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    with torch.inference_mode():
        x = made_apart(lambda: torch.zeros(2))
        assert not x.is_inference()
    assert waits == [x.device]
    with pytest.raises(ZeroDivisionError):
        made_apart(lambda: torch.zeros(1 // 0))


@pytest.mark.parametrize("places", [(), (2,), (0, 2), (2, 0, 2)])
def test_what_is_picked_is_a_tuple_whatever_it_has(places: tuple[int, ...]) -> None:
    assert make_picker(places)("abc") == tuple("abc"[place] for place in places)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of some type with any strides in the first of 256 bytes."""
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 20))
    return _MEMORY.view(dtype).as_strided(shape, strides, offset)


_MEMORY = torch.zeros(256, dtype=torch.uint8)


def bytes_of(x: torch.Tensor) -> set[int]:
    """Returns which bytes of memory its elements are, one after the other."""
    size, found = x.element_size(), {x.storage_offset() * x.element_size()} if x.numel() else set()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        found = {at + i * stride * size for at in found for i in range(length)}
    return {int(at) + i for at in found for i in range(size)}


@settings(max_examples=300)
@given(views(), views())
def test_elements_are_shared_where_some_byte_is(a: torch.Tensor, b: torch.Tensor) -> None:
    assert share_elements(a, b) == bool(bytes_of(a) & bytes_of(b))


def test_parts_of_one_tensor_share_no_elements() -> None:
    """Heads side by side in the rows of one projection, whose rows lie between each other's."""
    q, k, v, o = torch.zeros(2, 1000, 4, 8, 64).unbind(2)
    assert not any(share_elements(o, x) for x in (q, k, v))
    assert share_elements(o, o[:, ::3])
    wide = torch.zeros(3, 5, 64 + 16)
    assert not share_elements(wide[..., :64], wide[..., 64:])
    assert share_elements(wide[..., :65], wide[..., 64:])


def test_layouts_that_nobody_means_are_refused_after_few_tries() -> None:
    """Steps without a common divisor, of which all sums would have to be tried."""
    a = ((1, 0), (1_000_003, 4999), (999_983, 4999), (777_767, 4999), (555_557, 4999))
    b = ((1, 0), (1_000_033, 4999), (999_961, 4999), (777_743, 4999), (555_523, 4999))
    assert memory._meet(a, b, 123_456_789)
    # a common divisor that the distance does not have decides it at once
    even = [tuple((2 * step, last) for step, last in steps[1:]) for steps in (a, b)]
    assert not memory._meet(((1, 0), *even[0]), ((1, 0), *even[1]), 123_456_789)
