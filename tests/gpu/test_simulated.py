"""Cases that are simulated in a process that runs the others on the GPU."""

from __future__ import annotations

import pytest

from attnc.verify.search import run
from attnc.verify.simt import available
from attnc.verify.trials import trial_of
from tests.plans import module_of


@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize("spec", ["prefix_lm", "decode"])
def test_both_are_right_and_neither_runs_the_others_module(spec: str) -> None:
    trial = trial_of(module_of(spec, "cuda.sm_80"))
    for _ in range(2):  # what the first has prepared must not serve the second
        report = run(trial, count=2)
        assert report.ok, report.failures
        assert report.simulated == 2
        assert report.examples == 2
    assert trial.device == "cuda"
