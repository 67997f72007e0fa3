"""Specs that were wrong once in `tests.gpu.random_specs`, with the cases that showed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnc.verify.case import Case
from attnc.verify.subject import subject_of
from tests.gpu.random_specs import wrong_on
from tests.verify.judging import modules_of

#: What is not understood yet.
OPEN = {
    "narrow_values_beside_wide_keys": "on an H200 133 of 640 elements of Triton's o are wrong; those of its"
    " interpreter and of both CUDA targets are right",
}
SPECS = sorted((Path(__file__).parent / "found_specs").glob("*.attn"))


def marked(path: Path) -> Any:
    reason = OPEN.get(path.stem)
    return pytest.param(path, id=path.stem, marks=[] if reason is None else pytest.mark.xfail(reason=reason))


@pytest.mark.parametrize("path", map(marked, SPECS))
def test_it_is_right_now(path: Path) -> None:
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")
    case = Case.from_json(path.with_suffix(".json").read_text(encoding="utf-8"))
    made = {module.target: subject_of(module) for module in modules_of(path.read_text(encoding="utf-8"))}
    assert wrong_on(made, case) == {}
