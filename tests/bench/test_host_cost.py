"""What a call costs the host: which calls there are, how they are counted, and the table."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from attnc.bench.host_cost import Call, as_json, first_variants, jobs_of, markdown, measure_host
from attnc.build import front

SPECS = Path(__file__).parents[2] / "specs"
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}
COSTS = {
    Call("bias", "triton"): 12.34,
    Call("bias", "cuda.sm_80"): 10.7,
    Call("scaled_dot_product_attention", "PyTorch"): 14.2,
}


def test_there_is_a_module_for_each_attention_and_target() -> None:
    paths = [SPECS / "causal_gqa.attn", SPECS / "bias.attn"]
    modules = first_variants(paths)
    found = [(module.variant.attention.name, module.target) for module in modules]
    wanted = {(path.stem, schedule.target) for path in paths for schedule in front(path).schedules}
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert all(pickle.dumps(job) for job in jobs_of(modules))


def test_the_fastest_burst_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round all calls take turns, after three calls each to warm up."""
    made: list[str] = []
    clock = iter([0.0, 1.0, 10.0, 30.0, 40.0, 40.5, 50.0, 80.0])
    monkeypatch.setattr("attnc.bench.host_cost.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    first, second, _ = COSTS
    rounds: list[str] = []
    found = measure_host(
        {first: lambda: made.append("a"), second: lambda: made.append("b")}, 2, rounds.append
    )
    assert found == {first: 0.5 / 50 * 1e6, second: 20.0 / 50 * 1e6}
    assert made == ["a"] * 3 + ["b"] * 3 + (["a"] * 50 + ["b"] * 50) * 2
    assert rounds == ["round 1", "round 2"]


def test_the_table_has_a_column_for_each_target() -> None:
    text = markdown(COSTS, MACHINE)
    assert "| call | triton | cuda.sm_80 | PyTorch |" in text
    assert "| bias | 12.3 | 10.7 |  |" in text
    assert "| scaled_dot_product_attention |  |  | 14.2 |" in text


def test_figures_are_written_by_call() -> None:
    data = json.loads(as_json(COSTS, MACHINE))
    assert data["us"]["bias"] == {"triton": 12.34, "cuda.sm_80": 10.7}
    assert data["machine"] == MACHINE
