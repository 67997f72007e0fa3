"""Cases of CUDA modules that are simulated beside those on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from attnc.cli.judge import Judge, Judged
from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.search import AttentionTrial, Report, run
from attnc.verify.simt import _fill_flags, available
from attnc.verify.simulated import SimulatedTrial, simulate_beside, simulated_cases
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import trial_of
from tests.by_day import some_by_day
from tests.plans import module_of
from tests.planted.hunting import planted
from tests.planted.registry import BUGS

TELLING = Path(__file__).parents[1] / "telling_specs"
needs_gxx = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")


def on_gpu(subject: Subject) -> Subject:
    """Returns the subject as though it ran on a GPU."""
    return replace(subject, device="cuda")


@pytest.mark.parametrize("spec", ["causal_gqa", "decode", "varlen", "paged_decode"])
@pytest.mark.parametrize("target", ["cuda.sm_80", "cuda.sm_90a"])
def test_pipelines_are_filled_and_left_empty(spec: str, target: str) -> None:
    space = subject_of(module_of(spec, target), on_cpu=True).space
    filled, empty, keyless, unseen = simulated_cases(space)
    configs = space.configs_of(filled)
    for name, config in configs.items():
        if hasattr(config, "BLOCK_N"):
            splits = max(getattr(config, "splits", 0), 1) if name == "forward" else 1
            turns = config.STAGES + 1
            assert filled.dims["N"] > turns * splits * config.BLOCK_N, name
            assert filled.dims["M"] > (2 if name == "forward" else turns) * config.BLOCK_M, name
    joins = [number for number in space.usable if getattr(space.configs[number], "splits", 0) > 1]
    assert not joins or filled.config == joins[0]
    for kernel, others in space.configs_of(empty).items():
        is_alone = len(space.backward.get(kernel, space.usable)) == 1
        assert is_alone or others != configs[kernel]
    assert empty.dims["N"] < min(config.BLOCK_N for config in configs.values() if hasattr(config, "BLOCK_N"))
    assert keyless.dims["N"] == 0
    assert unseen.dims["N"] == filled.dims["N"]
    assert unseen.lengths == "empty" if "lengths" in space.factors else unseen.dims["M"] == 0


#: Planted bugs of copies, barriers and fences; what one of them does depends on which warp comes first.
WAITS = re.compile(r"wait|barrier|fence|too few|late lanes|are free")
RACES = [
    name
    for name, bug in BUGS.items()
    if bug.target.startswith("cuda.") and WAITS.search(name) and "a lane announces" not in name
]


@pytest.mark.one_in(3)
@needs_gxx
@pytest.mark.parametrize("name", some_by_day(RACES, of=14))
def test_missing_waits_show_in_the_simulator(name: str) -> None:
    subject = planted(BUGS[name])
    assert isinstance(subject, Subject)
    report = run(SimulatedTrial(subject, spares_gradients=False))
    assert not report.ok
    for failure in report.failures:
        assert failure.verdict.message.startswith("simulated: ")
        assert failure.repro.startswith("CUDA_VISIBLE_DEVICES= attnc verify ")


@pytest.mark.skipif(not available() or not _fill_flags(), reason="g++ fills locals from version 12 on")
def test_registers_that_nothing_has_set_show_in_the_simulator() -> None:
    """On a GPU they mostly hold 0 where there are no keys."""
    module, line = module_of("full", "cuda.sm_80"), "l[r] = 0.0f;"
    files = render_files(module, path="full.attn", sha256="")
    ((name, text),) = ((name, text) for name, text in files.items() if line in text)
    report = run(SimulatedTrial(subject_of(module, {name: text.replace(line, ";")}, on_cpu=True)))
    assert [failure.case.dims["N"] for failure in report.failures] == [0]


@pytest.mark.one_in(4)
@needs_gxx
@pytest.mark.parametrize(
    ("spec", "target", "wait", "message"),
    [
        ("unified_decode", "cuda.sm_80", "wait_copies<2 * (STAGES - 1)>();", "before a wait for it"),
        ("decode", "cuda.sm_90a", "mbarrier_wait(barrier_of(base, FULL, part), 0);", "ends where a copy"),
    ],
)
def test_waits_for_what_is_computed_again_or_never_read(
    spec: str, target: str, wait: str, message: str
) -> None:
    """Either leaves every result right: of what a copy has not brought, a guess is wrong, and what is copied
    for a sequence without keys is not read.
    """
    module = module_of(spec, target)
    files = render_files(module, path=f"{spec}.attn", sha256="")
    ((name, text),) = ((name, text) for name, text in files.items() if wait in text)
    changed = text.replace(wait, ";", 1)
    report = run(SimulatedTrial(subject_of(module, {name: changed}, on_cpu=True)))
    assert message in report.failures[0].verdict.message


@pytest.mark.one_in(2)
@needs_gxx
def test_a_lane_that_may_come_late_shows_in_any_order() -> None:
    """On a GPU lanes are mostly together; one that waits behind the others may wait for ever."""
    module = module_of("varlen", "cuda.sm_90a")
    text = render_files(module, path="varlen.attn", sha256="")["d128.cu"]
    changed, count = re.subn(r"(// A late lane would wait .*\n\s*)__syncwarp\(\);", r"\1;", text)
    assert count == 1
    report = run(SimulatedTrial(subject_of(module, {"d128.cu": changed}, on_cpu=True)))
    assert "a late lane" in report.failures[0].verdict.message


@pytest.mark.nightly
@pytest.mark.one_in(2)
@needs_gxx
def test_gradients_of_a_case_that_fills_pipelines_are_judged_beside_a_gpu() -> None:
    """However many steps its kernels take: of few tiles none waits for another."""
    module = module_of(TELLING / "wide_gradients_by_wgmma.attn", "cuda.sm_90a")
    wait = "mbarrier_wait(barrier_of(base, P_EMPTY, 0), parity ^ 1);"
    files = render_files(module, path="a.attn", sha256="")
    ((name, text),) = ((name, text) for name, text in files.items() if wait in text)
    beside = simulate_beside(on_gpu(subject_of(module)), module, {name: text.replace(wait, "")})
    assert beside is not None
    filled, *_ = beside.cases(0)
    assert "without a barrier between them" in beside.check(filled, ("nan",)).message


@needs_gxx
def test_simulated_cases_run_beside_those_on_a_gpu() -> None:
    module = module_of("prefix_lm", "cuda.sm_80")
    trial = AttentionTrial(subject_of(module))
    trial.simulated = simulate_beside(on_gpu(subject_of(module)), module)
    with patch.object(AttentionTrial, "cases", lambda self, count: ()):  # of the GPU, none
        report = run(trial)
    assert report.ok, report.failures
    assert (report.examples, report.simulated) == (0, 4)


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
