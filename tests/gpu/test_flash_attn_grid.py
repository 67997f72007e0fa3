"""The grid of flash-attention's own tests on a GPU: `pytest tests/gpu/test_flash_attn_grid.py -n 16`; on the
fastest kernels of the GPU, with ATTNC_GRID_TARGET=triton on Triton's.

A test is a form, which is compiled once, at several pairs of lengths and numbers of heads: processes share
the forms, so that they compile at the same time. What is judged, by which rule: tests/compat/flash_grid.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from attnc.compat import run_on
from tests.compat.flash_grid import Case, run

SIZES = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
)
CACHES = ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 8192), (128, 128))
HEADS = ((6, 6), (6, 1), (6, 2))
DTYPES = (torch.float16, torch.bfloat16)
_FLAGS = (False, True)


def trained() -> Iterator[Case]:
    """Forms of the calls with gradients; types and kinds of calls take turns over what else there is."""
    turns = cycle(product(("dense", "varlen"), DTYPES))
    for size, causal, local, alibi, softcap, dropout in product(
        SIZES, _FLAGS, _FLAGS, (0, 2), (0.0, 50.0), (0.0, 0.17)
    ):
        call, dtype = next(turns)
        if size not in (59, 64, 128, 256) and (softcap or dropout):
            call, dtype = "dense", torch.float16  # four sizes have everything with everything
            if causal == local:
                continue
        yield Case(
            call=call,
            dtype=dtype,
            size=size,
            causal=causal,
            local=local,
            alibi=alibi,
            softcap=softcap,
            dropout=dropout,
            grads=True,
        )
    for size, call, causal, local in product((64, 128), ("dense", "varlen"), _FLAGS, _FLAGS):
        yield Case(
            call=call, dtype=torch.bfloat16, size=size, causal=causal, local=local, sink=True, grads=True
        )
        yield Case(call=call, size=192, size_v=128, causal=causal, local=local, scale=0.11)


def cached() -> Iterator[Case]:
    """Forms of the calls against a cache."""
    turns = cycle(DTYPES)
    for size, causal, local, page, alibi in product((59, 64, 128, 256), _FLAGS, _FLAGS, (0, 16, 256), (0, 2)):
        case = Case(
            call="cache", size=size, dtype=next(turns), causal=causal, local=local, page=page, alibi=alibi
        )
        yield case
        yield replace(case, new=3, rotary=0.5 + 0.5 * causal, interleaved=local)
        yield replace(case, leftpad=True, new=3, alibi=0, softcap=30.0 * (alibi > 0))
        if not alibi:
            yield replace(case, ragged=True, sink=True)
    for size, causal in product((64, 128), _FLAGS):
        yield Case(call="cache", size=size, causal=causal, chosen=True, new=1)


def shapes(case: Case) -> Iterator[Case]:
    """A form at its lengths; with dropout at short ones, as the reference draws every element."""
    if case.call == "cache":
        for i, (rows, keys) in enumerate(CACHES):
            yield replace(case, rows=rows, keys=keys, heads=HEADS[i % 3], new=min(case.new, rows), batch=3)
        return
    for i, (rows, keys) in enumerate(LENGTHS[:4] if case.dropout else LENGTHS):
        yield replace(case, rows=rows, keys=keys, heads=HEADS[i % 3])


FORMS = [*trained(), *cached()]


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_form(case: Case, device: torch.device) -> None:
    run_on(os.environ.get("ATTNC_GRID_TARGET"))
    for shaped in shapes(case):
        try:
            run(shaped, device)
        except AssertionError as failure:
            raise AssertionError(f"{shaped}: {failure}") from None


def test_there_are_thousands() -> None:
    assert sum(1 for case in FORMS for _ in shapes(case)) > 4000
