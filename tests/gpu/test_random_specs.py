"""What a run of many random specs says; the run itself is `python -m tests.gpu.random_specs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.random_specs import Result, as_data, report


@pytest.fixture(autouse=True)
def device() -> None:
    """Needs no GPU."""


def test_a_wrong_spec_is_shown_and_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Result(0, 1, "text", features=("bf16", "grad"), gradients=True)
    bad = Result(0, 2, "attention", case="{}", wrong={"triton": "o is off"}, features=("bf16",))
    path = tmp_path / "out.json"
    assert report([as_data(good)], 1.0, 0, None) == 0
    assert report([as_data(good), as_data(bad)], 1.0, 0, path) == 1
    said = capsys.readouterr().out
    assert "2 specs on both targets, 1 with gradients, in 1 s" in said
    assert "drawn: bf16 2, grad 1" in said
    assert "seed 0, spec 2: {'triton': 'o is off'}" in said
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["wrong"], written["failures"][0]["text"]) == (1, "attention")


def test_a_run_of_nothing_is_no_success() -> None:
    assert report([], 1.0, 0, None) == 1
