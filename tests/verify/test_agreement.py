"""Kernels of one spec on two targets agree, and a bug in one of them shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.simt import available
from attnc.verify.subject import subject_of
from attnc.verify.trials import across
from tests.plans import plans_of
from tests.planted.bug import plant
from tests.planted.registry import BUGS

SPECS = Path(__file__).parents[2] / "specs"

pytestmark = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")


def test_targets_agree_and_a_bug_in_one_shows() -> None:
    modules = plans_of(SPECS / "paged_decode.attn").modules
    triton, cuda = (next(m for m in modules if m.target == t) for t in ("triton", "cuda.sm_80"))
    case = Case(dims={"B": 2, "M": 2, "Hkv": 1, "G": 3, "N": 100}, seed=4)
    right = across({"cuda.sm_80": subject_of(cuda)})
    assert not list(right(subject_of(triton), case))
    bug = BUGS["cuda serving: warps joined without their maxima"]
    name = f"{cuda.variant.name}.cu"
    text = plant(render_files(cuda, path="paged_decode.attn", sha256="0")[name], bug)
    wrong = across({"cuda.sm_80": subject_of(cuda, {name: text})})
    (message,) = wrong(subject_of(triton), case)
    assert message.startswith("cuda.sm_80: ")
