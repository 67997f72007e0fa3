"""Symbols where no mod runs any more, and what a tape notes of the tensors that a mod reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.flex.symbols import Scalar
from attnc.flex.trace import trace

SIZES = {"B": 2, "H": 3, "M": 4, "N": 5}
CPU = torch.device("cpu")


def test_a_symbol_that_is_kept_still_adds_to_its_tape() -> None:
    kept: Any = None

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        nonlocal kept
        kept = score
        return score

    traced = trace(mod, None, sizes=SIZES, device=CPU)
    found: list[Any] = [torch.tanh(kept), torch.add(kept, kept, alpha=3)]
    assert all(isinstance(x, Scalar) for x in found)
    assert [traced.tape.show(x.at) for x in found] == ["tanh(score)", "+(score, *(score, 3))"]


@pytest.mark.parametrize("learned", [False, True])
def test_a_number_that_learns_is_read_as_a_row(learned: bool) -> None:
    """Scalars of a spec have no gradients."""
    heat = torch.tensor(1.5, requires_grad=learned)
    traced = trace(lambda score, b, h, q, kv: score * heat, None, sizes=SIZES, device=CPU)
    (capture,) = traced.tape.captures
    assert (capture.tensor.dim(), capture.learned) == (int(learned), learned)
    assert traced.tape.places is None  # which takes time


AXES = (
    ("M",),
    ("N",),
    ("B", "M"),
    ("B", "N"),
    ("M", "N"),
    ("N", "M"),
    ("H", "M"),
    ("B",),
    ("H",),
    ("M", "H"),
)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("axes", AXES)
def test_rows_that_are_compared_are_known_to_ascend(axes: tuple[str, ...], dtype: torch.dtype) -> None:
    shape = [SIZES[axis] for axis in axes]
    ascends = torch.arange(shape[-1]).expand(shape).to(dtype)
    for x, is_sorted in ((ascends, True), (-ascends, False), (ascends * 0, True), (ascends - 9, True)):

        def mask(b: Any, h: Any, q: Any, kv: Any, x: torch.Tensor = x) -> Any:
            index = {"B": b, "H": h, "M": q, "N": kv}
            return x[tuple(index[axis] for axis in axes)] > 1

        (capture,) = trace(None, mask, sizes=SIZES, device=CPU).tape.captures
        assert capture.axes == axes
        is_row = axes[-1] in "MN" and not {"M", "N"} <= {*axes}
        assert capture.is_sorted == (is_sorted and is_row and dtype != torch.float32)


def test_what_is_not_compared_is_not_looked_at() -> None:
    ids = torch.arange(5)
    traced = trace(lambda score, b, h, q, kv: score + ids[kv], None, sizes=SIZES, device=CPU)
    assert [capture.is_sorted for capture in traced.tape.captures] == [False]
