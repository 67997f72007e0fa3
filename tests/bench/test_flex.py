"""`attnc bench --flex`: its programs are ones that attnc compiles, and its table says who took how long."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attnc.bench.flex import FlexBenchmark, FlexResult, markdown
from attnc.bench.flex_programs import MODS, OURS, TORCH, TRITON
from attnc.flex import to_spec
from attnc.runtime.timing import Timing

MACHINE = {"device": "NVIDIA H200", "torch": "2.13.0"}


def timing(median: float) -> Timing:
    return Timing(median=median, low=median, high=median, samples=3)


RESULT = FlexResult(
    "causal",
    "cuda.sm_90a",
    forward={OURS: timing(1.0), TRITON: timing(1.25), TORCH: timing(1.5)},
    both={OURS: timing(4.0), TORCH: timing(5.0)},
    first={OURS: [2.0, 0.01, 0.02], TORCH: [20.0, 10.0, 0.5]},
    host={OURS: 60.0, TORCH: 80.0},
)


@pytest.mark.parametrize("name", MODS)
def test_programs_are_said(name: str) -> None:
    assert "normalize = softmax" in to_spec(*MODS[name](64, "cpu"), head_dim=128)


def test_the_table() -> None:
    assert markdown([RESULT], MACHINE).splitlines()[-1] == (
        "| causal | cuda.sm_90a | 1.000 | 1.250 | 1.500 | 1.50x | 4.000 | 4.000 | 5.000 | 1.25x"
        " | 2.0 | 20.0 | 0.01 + 0.02 | 10.00 + 0.50 | 60 | 80 |"
    )


def test_a_program_that_torch_cannot_run_has_no_figure_of_it() -> None:
    alone = replace(RESULT, both={OURS: timing(4.0)})
    (row,) = markdown([alone], MACHINE).splitlines()[-1:]
    assert row.startswith(
        "| causal | cuda.sm_90a | 1.000 | 1.250 | 1.500 | 1.50x | 4.000 | 4.000 | n/a |  | 2.0 |"
    )


def test_the_files(tmp_path: Path) -> None:
    table, data = FlexBenchmark().page([RESULT], MACHINE).write(tmp_path, "flex")
    assert table.read_text() == markdown([RESULT], {**MACHINE, "target": "cuda.sm_90a"})
    (row,) = json.loads(data.read_text())["results"]
    assert row["first"][TORCH] == [20.0, 10.0, 0.5]


def test_a_program_of_ours_that_fails_has_no_ratio() -> None:
    alone = replace(RESULT, forward={TORCH: timing(1.5)})
    row = markdown([alone], MACHINE).splitlines()[-1]
    assert row.startswith("| causal | cuda.sm_90a | n/a | n/a | 1.500 |  | 4.000 |")


def test_nothing_is_loaded_before_the_wait_for_a_first_result_begins() -> None:
    program = "import sys, attnc.bench.flex_programs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = done.stdout.split()
    assert "torch" in loaded
    assert not {"attnc.flex", "attnc.plan", "cupy", "jinja2", "lark", "triton"} & {*loaded}
