"""Sums of segments that wide heads keep in memory on Hopper, on the CPU: blocks take places in turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attnc.support import hopper_call
from attnc.target.files import render_files
from attnc.target.support import support_files
from attnc.verify.case import Case
from attnc.verify.check import check
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec, subject_with_changes

TEXT = spec(
    [
        "input q: bf16[B, M, Hkv * G, 320]",
        "input k: bf16[B, N, Hkv, 320]",
        "input v: bf16[B, N, Hkv, 320]",
        "score = dot(q, k) / 20",
        "mask = causal",
        "normalize = softmax",
        "order = absolute(64)",
        "output o: bf16[B, M, Hkv * G, 320]",
    ],
    "loops = [kv], pack = gqa",
    target="cuda.sm_90a",
)
#: More tiles of rows than multiprocessors that a CPU stands for, and three segments.
MANY = Case(dims={"B": 1, "Hkv": 2, "G": 1, "M": 180, "N": 180}, seed=3)
ALONE = ("multiprocessor() % args.PLACES", "0")


@pytest.mark.one_in(2)
@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), (ALONE,)], ids=["apart", "all ask for the first"])
def test_blocks_have_places_of_their_own(changes: Sequence[tuple[str, str]]) -> None:
    found = check(subject_with_changes(TEXT, *changes), MANY, fills=("nan",))
    assert found.ok, found.message


@needs_gxx
@pytest.mark.slow
def test_places_that_are_shared_are_found() -> None:
    taken = "is_taken = take_place(args.counter_ptr, asked_place);"
    made = subject_with_changes(TEXT, ALONE, (taken, "is_taken = 0;"))
    assert not check(made, MANY, fills=("nan",)).ok


def test_memory_does_not_grow_with_rows() -> None:
    (module,) = modules_of(TEXT)
    declared = render_files(module, path="a.attn", sha256="")["default.py"]
    assert 'scratch={"_sums": "multiprocessors() * BLOCK_M * 320 * (N > 64)"}' in declared


def test_marks_lie_where_python_makes_room_for_them() -> None:
    assert f"MARKS_AT = {hopper_call.MARKS_AT};" in support_files()["_support/sm90_places.cuh"]
