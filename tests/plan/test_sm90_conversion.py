"""When Hopper's kernels have keys and values of 8 bits converted before them."""

from __future__ import annotations

import pytest

from attnc.plan.sm90 import decode_layout_of
from tests.plan.test_sm90_narrow import planned
from tests.refusals import refusal


@pytest.mark.parametrize(("k", "v"), [("e4m3", "bf16"), ("bf16", "i8"), ("e5m2", "e5m2")])
def test_wide_heads_are_converted_before_where_a_schedule_says_so(k: str, v: str) -> None:
    module = planned("convert = before", k=k, v=v, d=384)
    assert module.conversion is not None
    assert [made.stored.tensor.name for made in module.conversion.tensors] == [
        name for name, dtype in (("k", k), ("v", v)) if dtype != "bf16"
    ]
    assert not decode_layout_of(module.kernel).narrow


@pytest.mark.parametrize("knobs", ["convert = tiles", "convert = auto", "tile.kv = 32"])
def test_their_tiles_are_not(knobs: str) -> None:
    assert "E0602" in refusal(planned, knobs, d=384)


def test_rows_of_narrower_heads_are_converted_as_they_come() -> None:
    assert "it reads each key once" in refusal(planned, "convert = before", d=256)


def test_rows_of_16_bits_are_not_converted() -> None:
    assert planned("convert = before", k="bf16", v="bf16", d=384).conversion is None
