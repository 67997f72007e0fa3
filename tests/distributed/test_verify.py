"""How attention over ranks is verified: which cases are drawn, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnc.distributed import ContextParallel, verify
from attnc.distributed.engine import ContextParallel as Engine
from attnc.distributed.estimate import STRATEGIES
from attnc.distributed.group import Alone, Group
from attnc.distributed.kernels import spec_of
from attnc.distributed.verify import (
    RankReport,
    RanksCase,
    cases,
    over_ranks,
    refuse_heads,
    run_case,
    verify_here,
)
from attnc.model.attention import Attention
from attnc.plan.ir.backward import GradientBound
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.problem import build
from attnc.verify.strategies import free_dims
from attnc.verify.tolerance import to_float64
from attnc.verify.verdict import Verdict
from tests.distributed.specs import SPECS, text

ensure_interpreter()

#: As many as there are of (M, N).
COUNT = 7


def attention_of(spec: str) -> Attention:
    return spec_of(spec).variants[0].attention


@pytest.mark.parametrize("name", sorted(SPECS))
def test_cases_have_every_size_and_strategy(name: str) -> None:
    """Sizes that a spec leaves open are all there, the same in every run, and grow alike."""
    attention = attention_of(SPECS[name])
    made = list(cases(attention, COUNT))
    assert made == list(cases(attention, COUNT))
    assert [case.strategy for case in made][:5] == [None, *STRATEGIES]
    assert all(case.case.dims.keys() == set(free_dims(attention)) for case in made)
    if not attention.q.storage.is_packed:
        rows = [(case.case.dims["M"], case.case.dims["N"]) for case in made]
        assert len(set(rows)) == COUNT
        assert (1, 1) in rows
        assert any(m < n for m, n in rows)
        assert any(m % 16 and m > 16 for m, _ in rows)
        assert any(m == n and m % 16 == 0 for m, n in rows)  # whole blocks
        assert any(m > 128 for m, _ in rows)  # more than a tile
        assert max(m for m, _ in rows) * verify._GPU_SCALE > 4 * 128  # tiles for four ranks
        if {"Hkv", "G"} <= made[0].case.dims.keys():
            counts = {(case.case.dims["Hkv"], case.case.dims["G"] > 1) for case in made}
            assert {(1, True), (2, True), (4, False)} <= counts
        long = [case.case.dims for case in cases(attention, COUNT, 4)]
        assert [(dims["M"], dims["N"]) for dims in long] == [(4 * m, 4 * n) for m, n in rows]
        shared = {key for key in long[0] if key in ("B", "Hkv", "H", "G")}
        assert all(long[i][key] == made[i].case.dims[key] for i in range(COUNT) for key in shared)
        assert len({case.case.dims["B"] for case in made}) == 3


@pytest.mark.parametrize("scale", [1, 4])
def test_packed_sequences_have_no_more_queries_than_keys(scale: int) -> None:
    """Which ranks could not share out."""
    attention = attention_of(SPECS["packed"])
    made = [case.case for case in cases(attention, COUNT, scale)]
    for case in made:
        inputs = build(attention, case).inputs
        queries, keys = (np.diff(to_float64(inputs[name])) for name in ("cu_q", "cu_k"))
        assert (queries <= keys).all()
    assert len({*(tuple(case.dims.items()) for case in made)}) > 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_dropout_has_heads_for_each_rank(ranks: int) -> None:
    """It leaves rows whole, so that heads alone are shared out."""
    attention = attention_of(SPECS["dropout"])
    dims = [case.case.dims for case in cases(attention, COUNT, 1, ranks)]
    assert [case["Hkv"] for case in dims] == [
        ranks * case.case.dims["Hkv"] for case in cases(attention, COUNT)
    ]
    assert refuse_heads(attention, ranks) == ""
    six = text(inputs=("p: f32[]", "seed: i64[]"), normalize="softmax(dropout = p, seed = seed)", heads="6")
    assert refuse_heads(attention_of(six), ranks) == ""
    assert "6 K/V heads are no multiple of 4 ranks" in refuse_heads(attention_of(six), 4)
    assert refuse_heads(attention_of(text(heads="6")), 4) == ""


def test_sizes_of_a_spec_are_as_long_as_keys() -> None:
    for case in cases(attention_of(SPECS["distances"]), COUNT, 3):
        assert case.case.dims["R"] == case.case.dims["N"]


@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (64, 2), (130, 4), (4096, 8)])
def test_sums_over_ranks_have_as_many_more_parts(rows: int, ranks: int) -> None:
    bound = spec_bound()
    found = over_ranks(bound, ranks, rows).min_tile
    assert found == max(rows // (-(-rows // bound.min_tile) + ranks), 1)
    assert -(-rows // found) >= min(-(-rows // bound.min_tile) + ranks, rows)


def spec_bound() -> GradientBound:
    cp = ContextParallel(SPECS["causal"], Alone())
    backward = cp.kernels_for(torch.empty(1, 4, 2, 16, device="meta"))[0].module.backward
    assert backward is not None
    return backward.bound


SMALL = {"B": 1, "M": 20, "N": 20, "Hkv": 1, "G": 2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("outputs", [(True, 0.2), (True, 0.7), (False, 2.0)])
@pytest.mark.parametrize("gradients", [(True, 0.3), (False, 0.5), (False, 3.0)])
def test_a_verdict_is_that_of_outputs_and_of_gradients(
    outputs: tuple[bool, float], gradients: tuple[bool, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right where both are, and as bad as the worse one; what is wrong is named."""
    given = {
        name: Verdict(ok=ok, message=f"of {name}", worst=worst, where="")
        for name, (ok, worst) in (("outputs", outputs), ("gradients", gradients))
    }
    monkeypatch.setattr(verify, "judge", lambda *_: given["outputs"])
    monkeypatch.setattr(verify, "judge_gradients", lambda *_: given["gradients"])
    cp = ContextParallel(SPECS["causal"], Alone())
    verdict = run_case(cp, cp.spec.variants[0], RanksCase(case=Case(dims=SMALL)))
    assert verdict.ok == (outputs[0] and gradients[0])
    if not outputs[0]:
        assert verdict.message == "of outputs"
    elif not gradients[0]:
        assert (verdict.message, verdict.worst) == ("of gradients", gradients[1])
    else:
        assert verdict.worst == max(outputs[1], gradients[1])


def test_a_strategy_that_sizes_do_not_allow_gives_way() -> None:
    """Three heads on one rank are shared out to nobody: 'mixed' has no groups."""
    cp = ContextParallel(SPECS["causal"], Alone())
    verdict = run_case(cp, cp.spec.variants[0], RanksCase(case=Case(dims=SMALL), strategy="mixed"))
    assert verdict.ok, verdict.message
    assert cp.strategy is None


def test_outputs_alone_are_judged_of_a_spec_without_gradients() -> None:
    spec = SPECS["causal"].replace("  grad q, k, v\n", "")
    cp = ContextParallel(spec, Alone())
    assert run_case(cp, cp.spec.variants[0], RanksCase(case=Case(dims=SMALL))).ok


def test_gradients_of_a_number_are_judged() -> None:
    """A case may pass a number, which has none until it is a tensor."""
    spec = text(score="dot(q, k) * t", inputs=("t: f32[]",), grads=", t")
    cp, made = ContextParallel(spec, Alone()), Case(dims=SMALL, seed=1)
    variant = cp.spec.variants[0]
    assert isinstance(build(variant.attention, made).inputs["t"], float)
    verdict = run_case(cp, variant, RanksCase(case=made))
    assert verdict.ok, verdict.message


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Engine, RanksCase, str]]:
    """What `run_case` is called with, in place of a run."""
    calls = list[tuple[Engine, RanksCase, str]]()

    def call(cp: Engine, variant: Any, made: RanksCase, device: str) -> Verdict:
        calls.append((cp, made, device))
        return Verdict(ok=made.case.seed != 1, message="", worst=0.1 * made.case.seed, where="")

    monkeypatch.setattr(verify, "run_case", call)
    return calls


@pytest.mark.parametrize(("name", "dtype"), [(None, "f32"), ("bf16", "bf16")])
def test_a_process_verifies_its_rank(
    alone: Group, seen: list[tuple[Engine, RanksCase, str]], name: str | None, dtype: str
) -> None:
    """The variant that is named, or the first; on the CPU where there is no GPU for each rank."""
    wanted = (
        None if name is None else next(v.name for v in spec_of(SPECS["types"]).variants if "bf16" in v.name)
    )
    found = verify_here(0, SPECS["types"], "small", "triton", 3, wanted)
    assert [device for _, _, device in seen] == ["cpu"] * 3
    assert [cp.params for cp, _, _ in seen] == [{"T": dtype}] * 3
    assert [made.case.seed for made, _ in found.verdicts] == [0, 1, 2]
    assert (found.ranks, found.ok, found.place) == (alone.size, False, "Triton's interpreter, gloo")
    assert found.worst == pytest.approx(0.2)
    assert not found.verdicts[1][1].ok


@pytest.mark.parametrize(
    ("is_there", "count", "rank"), [(False, 2, 0), (True, 2, 1), (True, 1, 1), (True, 0, 1)]
)
def test_a_rank_has_a_gpu_of_its_own_or_none(
    is_there: bool,
    count: int,
    rank: int,
    alone: Group,
    seen: list[tuple[Engine, RanksCase, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU where there are fewer GPUs than ranks, or a driver that cannot be used."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = verify_here(rank, SPECS["causal"], "small", "triton", 1)
    has_own = is_there and rank < count
    assert [device for _, _, device in seen] == [f"cuda:{rank}" if has_own else "cpu"]
    assert found.place == ("a GPU" if has_own else "Triton's interpreter, gloo")


def test_nothing_is_as_right_as_can_be() -> None:
    assert RankReport(ranks=2, place="", verdicts=()).ok
    assert RankReport(ranks=2, place="", verdicts=()).worst == 0.0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_rank_alone_writes_verdicts(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = Verdict(ok=True, message="", worst=0.5, where="o")
    report = RankReport(ranks=3, place="here", verdicts=((RanksCase(case=Case(dims=SMALL)), verdict),))
    monkeypatch.setattr(verify, "verify_here", lambda *_, **__: report)
    path = tmp_path / "verdicts.json"
    verify._verify_rank(rank, "", "small", "triton", None, None, 1, str(path))
    assert path.is_file() == (rank == 0)
