"""Sizes that launches of CUDA kernels are made of."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.runtime.loader import load_text
from attnc.support.cuda_call import Arguments, CudaLaunch, Kernel, Kernels, dq_floats, ready, with_sizes
from attnc.support.place import Place
from tests.support.configs import CONFIGS, H200

GENERATED = Path(__file__).parents[2] / "generated"


def test_sums_of_dq_have_whole_fragments() -> None:
    assert dq_floats(CONFIGS[0], 8) == 128 * 128
    assert dq_floats(CONFIGS[0]._replace(BLOCK_M=64, WARPS=8), 4) == 64 * 64


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_are_aligned_where_every_stride_is(axis: int) -> None:
    """Of sequences, rows and heads alike: 16 bytes are copied at a time."""
    text = (GENERATED / "causal_gqa" / "cuda_sm_80" / "bf16_d64.py").read_text(encoding="utf-8")
    call = vars(load_text(text))["CALL"]
    call.forget()
    shape, strides = (2, 3, 4, 64), [1024, 320, 80, 1]
    found = []
    for beyond in (0, 8, 4):
        changed = [stride + beyond * (at == axis) for at, stride in enumerate(strides)]
        x = torch.empty_strided(shape, changed, dtype=torch.bfloat16)
        *_, launches = call._prepare((x, x, x), None, None, call.no_extras)
        found.append(launches[0].arguments.rows_aligned)
    assert found == [True, True, False]


@pytest.mark.parametrize("splits", [1, 2])
def test_what_joins_splits_is_launched_where_there_are_some(splits: int) -> None:
    """And whatever stands behind it anyway, with the config of its own and blocks by its sizes."""
    small, large = CONFIGS[2], CONFIGS[1]
    names = {"SPLITS": splits, "M": 130, "config": small, "dq_config": large}
    kernels = [
        Kernel(name, "cdiv(M, BLOCK_M)", joins=name == "join", config="dq" if name == "last" else "")
        for name in ("first", "join", "last")
    ]
    launch = Kernels(kernels=tuple(kernels), addresses="", strides="", numbers="")
    found = ready(launch, names)
    expected = [("first", small, 3, False), ("join", small, 3, True), ("last", large, 3, False)]
    assert found == [each for each in expected if splits > 1 or not each[3]]
    del names["SPLITS"]
    assert [kernel.name for kernel in ready(launch, names)] == ["first", "last"]


def test_kernels_run_in_as_many_rounds_as_their_sizes_say() -> None:
    place = Place({"heads": 5}, {}, {}, (), (), H200, torch.device("cpu"))
    once, often = (
        Kernels(kernels=(), addresses="", strides="", numbers="", rounds=rounds)
        for rounds in ("", "cdiv(heads, 2)")
    )
    assert [at.names["ROUND"] for at in once.list_places(place)] == [0]
    assert [at.names["ROUND"] for at in often.list_places(place)] == [0, 1, 2]
    sizes = {"first": "2 * ROUND", "many": "min(2, heads - first)"}
    launch = Kernels(kernels=(), addresses="", strides="", numbers="", sizes=sizes, rounds="cdiv(heads, 2)")
    found = [with_sizes(launch, at) for at in launch.list_places(place)]
    assert [(names["first"], names["many"]) for names in found] == [(0, 2), (2, 2), (4, 1)]


@pytest.mark.parametrize("rows_aligned", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("beyond", [0, 8, 16])
def test_kernels_of_aligned_rows_run_where_all_matrices_begin_at_16_bytes(
    rows_aligned: bool, at: int, beyond: int
) -> None:
    """Of what is no matrix nothing is asked; addresses are moved to where kernels enter a tensor."""
    arguments = Arguments((4, 7, -1, 2), (0, 3), ((1, 256), (2, 64)), b"numbers", rows_aligned)
    program: Any = SimpleNamespace()
    launch: Any = CudaLaunch(program, H200, (), arguments)
    launch.starter = lambda aligned: aligned
    addresses = {4: 1 << 40, 7: 1 << 41, 2: 1 << 42}
    moved = [*addresses][at]
    addresses[moved] += beyond
    start, packed = launch.pack(addresses)
    assert start == (rows_aligned and (beyond != 8 or moved == 7))
    assert packed == struct.pack("=4Q", addresses[4], addresses[7] + 256, 0, addresses[2]) + b"numbers"
