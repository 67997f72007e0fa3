"""What a run of many random specs says; the run itself is `python -m tests.gpu.random_specs`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnc.verify.case import Case
from tests.gpu import random_specs
from tests.gpu.random_reruns import again
from tests.gpu.random_specs import Mode, Record, Result, as_data, draw
from tests.processes import cpu_seconds, searched


@pytest.fixture(autouse=True)
def device() -> None:
    """Needs no GPU."""


GOOD = Result(0, 1, "text", features=("bf16", "grad"), targets=("triton", "cuda.sm_80"), gradients=True)
BAD = Result(
    4, 2, "attention", case="{}", wrong={"triton": "o is off"}, features=("bf16",), targets=("triton",)
)


SPEC = """\
attention tiny {
  input q: f16[B, H, M, 16]
  input k, v: f16[B, H, N, 16]
  score = dot(q, k)
  normalize = softmax
  output o: f16[B, H, M, 16]
}
schedule tiny for triton { loops = [q, kv] }
"""
CASE = '{"dims":{"B":1,"H":1,"M":3,"N":5}}'


def test_a_wrong_spec_is_shown_and_fails_the_run(tmp_path: Path) -> None:
    record, path = Record(seconds=1.0), tmp_path / "out.json"
    record.add(as_data(GOOD))
    record.add(as_data(BAD))
    said = "\n".join(record.summary())
    assert "in 1 s: 2 specs, 0 on three targets, 1 with gradients" in said
    assert "drawn: bf16 2, grad 1" in said
    assert "seed 4, spec 2: {'triton': 'o is off'}" in said
    record.write(path)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["wrong"], written["failures"][0]["text"]) == (1, "attention")


def test_a_later_run_goes_on_from_the_next_seed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = Record(seconds=2.0)
    first.add(as_data(BAD))
    first.write(path)
    second = Record.of(path)
    assert (second.seed, second.seconds) == (5, 2.0)
    second.add(as_data(GOOD))
    assert (second.counts["specs"], second.counts["wrong"], second.seed) == (2, 1, 5)


def test_a_spec_without_room_in_memory_is_kept_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [replace(BAD, number=n, text=SPEC, case=CASE, wrong={}, lacked="no room") for n in range(2)]
    record, path = Record(), tmp_path / "out.json"
    for result in (GOOD, *lacking):
        record.add(as_data(result))
    assert record.is_right, "nothing was wrong"
    assert (record.counts["specs"], record.counts["without memory"]) == (1, 2)
    record.write(path)
    found = Record.of(path)
    assert [spec["text"] for spec in found.unjudged] == [SPEC, SPEC]
    monkeypatch.setenv("PYTHONPATH", searched())
    monkeypatch.chdir(Path(__file__).parents[2])
    again(found, 1, path, Mode())
    assert (Record.of(path).unjudged, Record.of(path).failures) == ([], [])
    assert (found.counts["specs"], found.counts["without memory"]) == (3, 0)


def test_a_kernel_that_runs_out_of_memory_leaves_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> dict[str, str]:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(random_specs, "wrong_on", fail)
    found = next(draw(7, 0, Mode(targets=("triton",))))
    assert (found.lacked, found.wrong) == ("no room", {})
    assert found.text
    assert Case.from_json(found.case).dims


def test_time_of_a_process_is_that_of_its_processor() -> None:
    """By which a worker is taken for one that hangs, however busy others keep the machine."""
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) == before:
        sum(range(10_000))
    assert cpu_seconds(os.getpid()) > before
    assert cpu_seconds(1 << 30) == 0


def test_a_spec_on_three_targets_is_counted_as_such() -> None:
    three = Result(0, 1, "", targets=("triton", "cuda.sm_80", "cuda.sm_90a"), gradients=True, wgmma=True)
    found = three.counts
    assert found.pop("wrong") == found.pop("refused") == found.pop("without memory") == 0
    assert set(found.values()) == {1}


@pytest.mark.parametrize(("results", "right"), [([], False), ([GOOD], True), ([GOOD, BAD], False)])
def test_a_run_is_a_success_if_there_were_specs_and_none_was_wrong(
    results: list[Result], right: bool
) -> None:
    record = Record()
    for result in results:
        record.add(as_data(result))
    assert record.is_right == right
