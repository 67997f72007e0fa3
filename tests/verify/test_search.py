"""A kernel that ends the process's work on a GPU: what `attnc verify` says then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnc.cli import app
from attnc.runtime import memory
from attnc.runtime.memory import GpuLost, describe_loss, is_lost
from attnc.verify import search
from attnc.verify.case import Case, Kept
from attnc.verify.subject import Subject
from attnc.verify.verdict import Verdict
from tests.verify.judging import committed, fuzz, verify

SAID = (
    "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in"
    " https://docs.nvidia.com.\nCUDA kernel errors might be asynchronously reported."
)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The third launch of a kernel is the last that a GPU takes; the cases that are run from there on."""
    lost: list[Case] = []
    launches, run, take = 0, Subject.run, search.Step.take

    def fail(subject: Subject, *given: object, **named: object) -> None:
        nonlocal launches
        launches += 1
        if lost or launches == 3:
            raise RuntimeError(SAID)
        run(subject, *given, **named)  # type: ignore[arg-type]  # as it was called

    def note(step: search.Step, trial: search.Trial) -> Verdict:
        try:
            return take(step, trial)
        finally:
            if launches >= 3:
                lost.append(step.case)

    monkeypatch.setattr(Subject, "run", fail)
    monkeypatch.setattr(search.Step, "take", note)
    for module in (search, memory):
        monkeypatch.setattr(module, "is_lost", lambda device: launches >= 3)
    return lost


def test_the_first_case_is_named_and_no_other_is_run(failing: list[Case]) -> None:
    with pytest.raises(GpuLost) as raised:
        verify(replace(committed("full"), gradients=None), count=8)
    assert len(failing) == 1
    assert raised.value.case == failing[0]
    assert failing[0].to_json() in raised.value.repro
    said = str(raised.value)
    assert said.startswith("full-")
    assert "by full_forward: RuntimeError: CUDA error: an illegal memory access was encountered" in said
    assert said.endswith("encountered")


def test_a_search_keeps_the_case_and_makes_it_no_smaller(failing: list[Case], tmp_path: Path) -> None:
    with pytest.raises(GpuLost) as raised:
        fuzz(replace(committed("full"), gradients=None), examples=50, failures=tmp_path)
    assert [raised.value.case] == failing
    (kept,) = tmp_path.glob("*.json")
    told = Kept.from_json(kept.read_text(encoding="utf-8"))
    assert (told.case, told.target) == (failing[0], "triton")


def test_a_failure_that_leaves_the_gpu_well_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "run", lambda *given, **named: (_ for _ in ()).throw(RuntimeError(SAID)))
    report = verify(replace(committed("full"), gradients=None), count=8)
    assert len(report.failures) == 3


def test_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(dims={"B": 1})

    def lose(*given: object, **named: object) -> None:
        raise GpuLost(
            "full-d64 on a GPU, by full_forward: CUDA error", "attnc verify full.attn --case x", case
        )

    monkeypatch.setattr(app, "app", lose)
    assert app.run_guarded(["verify", "full.attn"]) == 1
    said = capsys.readouterr().err
    assert "error: full-d64 on a GPU, by full_forward: CUDA error" in said
    assert "attnc verify full.attn --case x" in said
    assert "bug in attnc" not in said


def test_a_cpu_is_never_lost() -> None:
    assert not is_lost("cpu")
    assert describe_loss("an error.\nmore") == "an error"


@pytest.mark.parametrize(("rule", "named"), [("cuda.sm_80", "cuda.sm_80"), ("keys permute", "")])
def test_a_command_names_the_target_that_disagreed(rule: str, named: str) -> None:
    """Properties are asked of every case that is run again, and other targets are not."""

    class Repeated(search.AttentionTrial):
        def __init__(self) -> None:
            pass

        def repro(self, case: Case, rule: str = "") -> str:
            return rule

    tally = search._Tally(Repeated(), None)
    tally.fail(Case(dims={}), Verdict(ok=False, message="", rule=rule))
    assert tally.failures[0].repro == named
