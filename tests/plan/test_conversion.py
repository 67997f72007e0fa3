"""What of K and V is converted before a kernel, and when: as schedules say, or the rule of the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnc.expr.nodes import Binary, Const, show
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged
from attnc.plan.conversion import count_alike, group_rows
from attnc.plan.ir import Module
from attnc.plan.ir.kernel import TILE_COLUMN
from tests.verify.judging import modules_of, spec


def planned(
    schedule: str = "",
    *,
    k: str = "e4m3",
    v: str = "e4m3",
    storage: str = "",
    target: str = "cuda.sm_90a",
    block: str = "",
    length: bool = False,
) -> Module:
    lines = [
        "input q: bf16[B, M, H, 64]",
        f"input k: {k}[B, N, H, 64]{storage}",
        f"input v: {v}[B, N, H, 64]{storage}",
        *(["input table: i32[B, P]"] if storage else []),
        *(["input lens: i32[B]", "length N = lens[b]"] if storage or length else []),
        *(["input ks: f32[B, N, H, 64]"] if block else []),
        f"score = dot(q, k{f' * ks[b, kv_idx, h, {block}]' if block else ''}) / 8",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
    ]
    (module,) = modules_of(spec(lines, schedule, target=target))
    return module


BEFORE = "convert = before"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["k", "v"]),
        ({"k": "bf16"}, ["v"]),
        ({"k": "bf16", "v": "bf16"}, []),
        ({"schedule": BEFORE, "k": "bf16", "v": "bf16"}, []),
        ({"k": "bf16", "v": "bf16", "block": "d // 16"}, ["k"]),
        ({"schedule": "convert = tiles"}, []),
        ({"schedule": "loops = [kv], split.kv = auto"}, []),
        ({"storage": " via paged(table, page = 16)"}, []),
        ({"schedule": BEFORE, "storage": " via paged(table, page = 16)"}, ["k", "v"]),
        ({"schedule": BEFORE, "v": "bf16", "storage": " via paged(table, page = 16)"}, ["k", "v"]),
        ({"length": True}, []),
        ({"schedule": BEFORE, "length": True}, ["k", "v"]),
        ({"length": True, "block": "d // 16"}, ["k", "v"]),
        ({"target": "triton"}, []),
    ],
)
def test_what_is_converted_before_the_kernel(options: dict[str, Any], expected: list[str]) -> None:
    module = planned(**options)
    found = [] if module.conversion is None else [x.stored.tensor.name for x in module.conversion.tensors]
    assert found == expected


def test_the_kernel_is_that_of_16_bits() -> None:
    module = planned(block="d // 16")
    same = planned(k="bf16", v="bf16")
    assert replace(module.kernel, dims=()) == replace(same.kernel, dims=())
    assert module.converted.variant.attention.k.dtype is DType.BF16
    assert module.variant.attention.k.dtype is DType.E4M3
    assert same.converted is same


def test_keys_in_pages_become_rows_that_follow_each_other() -> None:
    module = planned("convert = before", storage=" via paged(table, page = 16)")
    assert module.variant.attention.k.storage.is_paged
    assert module.converted.variant.attention.k.storage.is_plain
    assert [size.name for size in module.sizes] == ["N"]  # of the table, as callers give it
    assert module.kernel == planned("convert = before", k="bf16", v="bf16", length=True).kernel


def test_rows_behind_a_length_are_left_out() -> None:
    made = planned("convert = before", length=True).conversion
    assert made is not None
    (fetch,) = made.fetches
    assert made.length is not None
    assert (show(fetch.load), show(made.length), fetch.row) == ("lens[b]", fetch.name, None)
    whole = planned().conversion
    assert whole is not None
    assert whole.length is None


@pytest.mark.parametrize(("block", "columns"), [("d", 1), ("d // 32", 32), ("d // 16 + d // 24", 8)])
def test_how_many_columns_have_one_scale(block: str, columns: int) -> None:
    conversion = planned(block=block).conversion
    assert conversion is not None
    scale = conversion.tensors[0].scale
    assert scale is not None
    assert count_alike(scale) == columns
    assert conversion.tensors[1].scale is None


def test_a_scale_that_computes_with_columns_is_seen() -> None:
    conversion = planned(block="d // 16").conversion
    assert conversion is not None
    scale = conversion.tensors[0].scale
    assert scale is not None
    of_two = Binary("*", Binary("//", TILE_COLUMN, Const(8)), scale.value)
    assert count_alike(replace(scale, value=of_two)) == 8


def test_rows_are_converted_together_where_they_lie_alike() -> None:
    conversion = planned("convert = before", storage=" via paged(table, page = 16)").conversion
    assert conversion is not None
    assert [len(rows.tensors) for rows in group_rows(conversion)] == [2]
    k, v = conversion.tensors
    tensor, pages = v.stored.tensor, v.stored.tensor.storage
    assert isinstance(pages, Paged)
    for changed in (
        replace(tensor, shape=(*tensor.shape[:-2], Const(3), tensor.shape[-1])),
        replace(tensor, shape=(*tensor.shape[:-1], Const(32))),
        replace(tensor, roles=(tensor.roles[1], tensor.roles[0], *tensor.roles[2:])),
        replace(tensor, storage=replace(pages, block_table="other")),
    ):
        other = replace(v, stored=replace(v.stored, tensor=changed))
        found = group_rows(replace(conversion, tensors=(k, v, other)))
        assert [len(rows.tensors) for rows in found] == [2, 1]
