"""What a call costs the host: which calls there are, how they are counted, and the table."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch

from attnc.bench import host_cost
from attnc.bench.host_cost import HostBenchmark, HostCall, first_variants, measure_calls, place_of
from attnc.bench.host_functions import draw_trained, served_functions, trained_functions
from attnc.build import front
from attnc.runtime.timing import orders
from tests.plans import SPECS

MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}
COSTS = {
    HostCall("bias", "triton"): 12.34,
    HostCall("bias", "cuda.sm_80"): 10.7,
    HostCall("scaled_dot_product_attention", "PyTorch"): 14.2,
}


def test_there_is_a_module_for_each_attention_and_target() -> None:
    paths = [SPECS / "causal_gqa.attn", SPECS / "bias.attn"]
    modules = first_variants(paths)
    found = [(module.variant.attention.name, module.target) for module in modules]
    wanted = {(path.stem, schedule.target) for path in paths for schedule in front(path).schedules}
    assert len(found) == len(set(found))
    assert set(found) == wanted
    benchmark = HostBenchmark(modules)
    assert [cell.name for cell in benchmark.cells] == [name for name, _ in found]
    jobs = benchmark.jobs(benchmark.cells)
    assert all(pickle.dumps(job) for job in jobs)
    compiled = [job.args[0] for job in jobs if isinstance(job, partial)]
    assert compiled[len(found) :] == list(trained_functions(SMALL, "cpu"))


def test_the_fastest_burst_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round all calls take turns, after three calls each to warm up."""
    made: list[str] = []
    clock = iter([0.0, 1.0, 10.0, 30.0, 40.0, 40.5, 50.0, 80.0])
    monkeypatch.setattr("attnc.runtime.timing.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    turns = list(orders("ab", 2))
    rounds: list[str] = []
    found = measure_calls({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 2, rounds.append)
    bursts = dict(zip([(i, who) for i in range(2) for who in turns[i]], [1.0, 20.0, 0.5, 30.0], strict=True))
    fastest = {who: min(bursts[0, who], bursts[1, who]) for who in "ab"}
    assert found == {who: pytest.approx(seconds / 50 * 1e6) for who, seconds in fastest.items()}
    assert made == ["a"] * 3 + ["b"] * 3 + [who for turn in turns for who in turn for _ in range(50)]
    assert rounds == ["round 1", "round 2"]


def test_the_table_has_a_column_for_each_target() -> None:
    text = HostBenchmark(()).page(COSTS, MACHINE).markdown
    assert "| call | triton | cuda.sm_80 | PyTorch |" in text
    assert "| bias | 12.3 | 10.7 |  |" in text
    assert "| scaled_dot_product_attention |  |  | 14.2 |" in text


def test_figures_are_written_by_call() -> None:
    data = json.loads(json.dumps(HostBenchmark(()).page(COSTS, MACHINE).data))
    assert data["us"]["bias"] == {"triton": 12.34, "cuda.sm_80": 10.7}
    assert data["machine"] == {**MACHINE, "target": ""}


SMALL = {"B": 2, "H": 4, "Hkv": 2, "N": 20}


def test_functions_of_programs_take_the_same_inputs() -> None:
    """Causal ones compute the same; all have gradients."""
    tensors = draw_trained(SMALL, "cpu")
    found = {}
    for name, (function, lay) in trained_functions(SMALL, "cpu").items():
        inputs = [lay(x).detach().requires_grad_() for x in tensors]
        o = function(*inputs)
        assert all(x is not None for x in torch.autograd.grad(o.float().sum(), inputs))
        found[name] = o.transpose(1, 2) if name == "flex_attention" else o
    causal = [o.reshape(tensors[0].shape) for name, o in found.items() if "transformers" not in name]
    assert len(causal) == 5
    for o in causal:
        torch.testing.assert_close(o, causal[0], rtol=2e-2, atol=2e-2)


def test_functions_of_engines_can_be_called() -> None:
    calls = served_functions(SMALL, "cpu")
    assert len(calls) == 6
    for call in calls.values():
        call()


def test_calls_are_made_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's attention runs on attnc only in bursts of its own."""
    names = ("scaled_dot_product_attention", "scaled_dot_product_attention, its backward by autograd")
    wanted = {
        HostCall("flash_attn_func", "functions of attnc"): [],
        **{HostCall(name, "PyTorch"): [] for name in names},
        **{HostCall(name, "PyTorch's flash backend"): ["flash"] for name in names},
        **{HostCall(name, "functions of attnc"): ["flash", "attnc"] for name in names},
    }
    found: dict[HostCall, list[str]] = {}
    operator = "aten::_scaled_dot_product_flash_attention"

    def note(which: HostCall) -> None:
        is_ours = torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")
        found[which] = ["flash"] * (not torch._C._get_math_sdp_enabled()) + ["attnc"] * is_ours

    def time_burst(call: Callable[[], None], repeats: int) -> float:
        found.clear()
        call()
        seen.update(found)
        return 1.0

    seen: dict[HostCall, list[str]] = {}
    monkeypatch.setattr(host_cost, "host_ms", time_burst)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    measure_calls({x: partial(note, x) for x in wanted}, 1, lambda _: None, place_of)
    assert seen == wanted
