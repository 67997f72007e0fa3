"""Specs that were wrong once in `tests.gpu.random_specs`, with the cases that showed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.verify.case import Case
from attnc.verify.subject import subject_of
from tests.gpu.random_specs import wrong_on
from tests.verify.judging import modules_of

SPECS = sorted((Path(__file__).parent / "found_specs").glob("*.attn"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_is_right_now(path: Path) -> None:
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")
    case = Case.from_json(path.with_suffix(".json").read_text(encoding="utf-8"))
    made = {module.target: subject_of(module) for module in modules_of(path.read_text(encoding="utf-8"))}
    assert wrong_on(made, case) == {}
