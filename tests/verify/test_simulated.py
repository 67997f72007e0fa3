"""Cases of CUDA modules that are simulated beside those on a GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from attnc.cli.judge import Judge, Judged
from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.search import AttentionTrial, Report, run
from attnc.verify.simt import available
from attnc.verify.simulated import SimulatedTrial, simulate_beside, simulated_cases
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import trial_of
from tests.plans import module_of

needs_gxx = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
#: Waits of the forward: for keys, and for values.
WAIT = "wait_copies<2 * (STAGES - 1)>();"


def on_gpu(subject: Subject) -> Subject:
    """Returns the subject as though it ran on a GPU."""
    return replace(subject, device="cuda")


@pytest.mark.parametrize("spec", ["causal_gqa", "decode", "varlen", "paged_decode"])
@pytest.mark.parametrize("target", ["cuda.sm_80", "cuda.sm_90a"])
def test_pipelines_are_filled_and_left_empty(spec: str, target: str) -> None:
    space = subject_of(module_of(spec, target), on_cpu=True).space
    filled, empty = simulated_cases(space)
    configs = space.configs_of(filled)
    for name, config in configs.items():
        if hasattr(config, "BLOCK_N"):
            splits = max(getattr(config, "splits", 0), 1) if name == "forward" else 1
            turns = config.STAGES + 1
            assert filled.dims["N"] > turns * splits * config.BLOCK_N, name
            assert filled.dims["M"] > (2 if name == "forward" else turns) * config.BLOCK_M, name
    joins = [number for number in space.usable if getattr(space.configs[number], "splits", 0) > 1]
    assert filled.config == (joins or [space.usable[0]])[0]
    assert empty.dims["N"] < min(config.BLOCK_N for config in configs.values() if hasattr(config, "BLOCK_N"))


@needs_gxx
def test_a_missing_wait_shows_in_the_simulator() -> None:
    module = module_of("prefix_lm", "cuda.sm_80")
    name = f"{module.variant.kernels}.cu"
    text = render_files(module, path="prefix_lm.attn", sha256="0")[name]
    assert text.count(WAIT) == 2
    subject = subject_of(module)
    for changed, is_right in ((text, True), (text.replace(WAIT, ";"), False)):
        trial = AttentionTrial(subject)
        trial.simulated = simulate_beside(on_gpu(subject), module, {name: changed})
        with patch.object(AttentionTrial, "cases", lambda self, count: ()):  # what a GPU finds: nothing
            report = run(trial)
        assert report.ok == is_right
        assert report.simulated == (2 if is_right else report.simulated) > 0
        assert report.examples == 0
        for failure in report.failures:
            assert failure.verdict.message.startswith("simulated: ")
            assert failure.repro.startswith("CUDA_VISIBLE_DEVICES= attnc verify ")


@needs_gxx
def test_what_is_simulated_is_a_module_of_its_own() -> None:
    module = module_of("prefix_lm", "cuda.sm_80")
    beside = simulate_beside(on_gpu(subject_of(module)), module)
    assert beside is not None
    assert beside.device == "cpu"
    assert beside.subject.module is not subject_of(module).module
    assert beside.subject.module is subject_of(module, on_cpu=True).module


def test_only_cuda_on_a_gpu_is_simulated_beside() -> None:
    cuda, triton = (module_of("prefix_lm", target) for target in ("cuda.sm_80", "triton"))
    assert simulate_beside(subject_of(cuda), cuda) is None
    assert simulate_beside(on_gpu(subject_of(triton)), triton) is None
    assert trial_of(cuda).simulated is None
    with patch("attnc.verify.simt.available", lambda: False):
        assert simulate_beside(on_gpu(subject_of(cuda)), cuda) is None


def test_no_case_is_simulated_when_time_is_over() -> None:
    module = module_of("prefix_lm", "cuda.sm_80")
    subject = subject_of(module, on_cpu=True)
    trial = AttentionTrial(subject)
    trial.simulated = SimulatedTrial(subject)
    edge = Case(dims={"B": 0, "M": 1, "H": 1, "N": 1})
    with patch.object(AttentionTrial, "cases", lambda self, count: (edge,)):
        assert run(trial, seconds=-1.0).simulated == 0


@pytest.mark.parametrize(
    ("target", "device", "count", "has_gxx", "said"),
    [
        ("cuda.sm_80", "cuda", 2, True, "2 cases simulated: copies come late, warps run in any order"),
        ("cuda.sm_80", "cuda", 0, False, "no case simulated: there is no g++"),
        ("cuda.sm_90a", "cuda", 0, True, "no case simulated: something was wrong before, or time was over"),
        ("cuda.sm_80", "cpu", 0, True, ""),
        ("triton", "cuda", 0, True, ""),
    ],
)
def test_a_report_says_what_was_simulated(
    target: str, device: str, count: int, has_gxx: bool, said: str
) -> None:
    report = Report(examples=24, seconds=1.0, simulated=count)
    judged = Judged(judge=Judge(module_of("prefix_lm", target)), device=device, place="here", report=report)
    with patch("attnc.verify.simt.available", lambda: has_gxx):
        assert list(judged.simulation_lines()) == ([f"      {said}"] if said else [])
    assert judged.data["simulated"] == count
