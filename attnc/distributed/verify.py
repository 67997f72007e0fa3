"""Is attention over ranks right? Whole inputs are drawn as for one GPU, spread, computed, put together again
and held to the float64 reference of the whole, by the bound of the plan that the ranks run.

Rows are complete where they are computed, so the bound of o and lse is that of one kernel. Gradients of keys
are sums of what the ranks found, in f32: some more additions, which the bound counts as more partial sums.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnc.distributed.engine import ContextParallel
from attnc.distributed.estimate import STRATEGIES, Strategy
from attnc.distributed.group import on_processes
from attnc.distributed.kernels import spec_of
from attnc.expr.construct import number
from attnc.model.attention import Attention, Variant
from attnc.plan.ir.backward import GradientBound
from attnc.support.cache import own_folder
from attnc.verify.case import Case
from attnc.verify.check import as_leaf
from attnc.verify.gradient_bound import cotangents_of, expect_gradients, judge_gradients
from attnc.verify.problem import build
from attnc.verify.runners import runner_of
from attnc.verify.strategies import free_dims
from attnc.verify.tolerance import expect, to_float64
from attnc.verify.verdict import Verdict, judge

#: (M, N) of cases: one row, parts of a block, some blocks and more, rows that no number of ranks divides.
_SIZES = ((70, 70), (1, 1), (33, 80), (97, 97), (16, 16), (130, 130), (5, 64))
#: How many times as long they are on GPUs: several tiles for a rank. The reference is that of the CPU.
_GPU_SCALE = 4
#: (B, Hkv, G)
_BATCHES = ((1, 2, 2), (2, 4, 1), (1, 1, 3), (3, 2, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCase:
    """A case, and the strategy that it is run under (None: the estimate's choice)."""

    case: Case
    strategy: Strategy | None = None


def refuse_heads(attention: Attention, ranks: int) -> str:
    """Returns why dropout, which leaves rows whole, cannot be shared out to ranks; "" where it can."""
    heads = number(attention.heads_kv)
    if attention.softmax.dropout is None or heads is None or not heads % ranks:
        return ""
    return f"dropout shares out heads alone, and {heads:g} K/V heads are no multiple of {ranks} ranks"


def cases(attention: Attention, count: int, scale: int = 1, ranks: int = 1) -> Iterator[RanksCase]:
    """Yields cases of the attention, the same in every run. scale: how many times as long they are; ranks:
    that share the heads out where dropout leaves rows whole.
    """
    names, share = free_dims(attention), 1 if attention.softmax.dropout is None else ranks
    strategies: tuple[Strategy | None, ...] = (None, *STRATEGIES)
    for seed in range(count):
        m, n = _SIZES[seed % len(_SIZES)]
        b, kv_heads, group = _BATCHES[seed % len(_BATCHES)]
        kv_heads *= share
        dims = {"B": b, "M": m * scale, "N": n * scale, "Hkv": kv_heads, "H": kv_heads, "G": group}
        tied = "N" not in names or "M" not in names
        given = {name: dims.get(name, (m if tied else n) * scale) for name in names}
        case = Case(dims=given, seed=seed)
        strategy = strategies[seed % len(strategies)]
        yield RanksCase(case=_in_order(attention, case), strategy=strategy)


def _in_order(attention: Attention, case: Case) -> Case:
    ends = attention.q.storage.ends, attention.k.storage.ends
    if not all(ends):
        return case
    for seed in range(case.seed, case.seed + 500):
        tried = replace(case, seed=seed)
        inputs = build(attention, tried).inputs
        queries, keys = (np.diff(to_float64(inputs[name])) for name in ends)
        if (queries <= keys).all():
            return tried
    return replace(case, dims={**case.dims, "M": 1})


def run_case(cp: ContextParallel, variant: Variant, made: RanksCase, device: str = "cpu") -> Verdict:
    """Returns the verdict on one case, the same on every rank. Raises what a call raises; a strategy that
    these sizes do not allow gives way to the estimate's choice.
    """
    attention = variant.attention
    problem = build(attention, made.case, device=device)
    inputs: dict[str, Any] = dict(problem.inputs)
    q, k, v = (inputs.pop(name) for name in ("q", "k", "v"))
    kernels, _ = cp.kernels_for(q)
    cp.strategy = made.strategy
    try:
        plan = cp.plan(q, k, **inputs)
    except ValueError:
        cp.strategy = None
        plan = cp.plan(q, k, **inputs)
    shards = cp.shard(q, k, v, **inputs)[:3]
    wanted = kernels.attention.grads if kernels.has_gradients else ()
    leaves: dict[str, Any] = {
        name: as_leaf(attention.tensor(name), x, q.device) if name in wanted else x
        for name, x in (*zip(("q", "k", "v"), shards, strict=True), *inputs.items())
    }
    q, k, v = (leaves.pop(name) for name in ("q", "k", "v"))
    with torch.set_grad_enabled(bool(wanted)):
        results = cp(q, k, v, **leaves)
    results = results if isinstance(results, tuple) else (results,)
    names = [tensor.name for tensor in attention.outputs]
    whole = {name: cp.unshard(x, name) for name, x in zip(names, results, strict=True)}
    module = kernels.module
    verdict = judge(attention, expect(attention, problem.inputs, module.kernel.bound), whole)
    if not verdict.ok or not wanted or module.backward is None:
        return verdict
    arrays = {name: to_float64(x) for name, x in whole.items()}
    cotangents: dict[str, torch.Tensor] = {}
    mine = []
    for name, value in cotangents_of(attention, arrays, made.case.seed):
        full = torch.from_numpy(np.array(value)).to(whole[name].dtype).to(device)
        cotangents[name] = full
        mine.append(cp.own(full, name))
    leaves = {"q": q, "k": k, "v": v, **leaves}
    asked = {name: x for name, x in leaves.items() if name in wanted}
    gradients = torch.autograd.grad(results[: len(mine)], list(asked.values()), mine)
    found = {
        name: cp.unshard(x, name) if name in ("q", "k", "v") else x
        for name, x in zip(asked, gradients, strict=True)
    }
    plain = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in problem.inputs.items()}
    with np.errstate(invalid="ignore"):
        bound = over_ranks(module.backward.bound, plan.ranks, max(plan.sizes.queries, 1))
        expected = expect_gradients(attention, plain, cotangents, bound)
    judged = judge_gradients(expected, found)
    worse = judged if judged.worst > verdict.worst or not judged.ok else verdict
    return replace(worse, ok=judged.ok)


def over_ranks(bound: GradientBound, ranks: int, rows: int) -> GradientBound:
    """Returns the bound of sums over rows that are added up rank by rank: that of as many more
    partial sums.
    """
    sums = -(-rows // bound.min_tile) + ranks
    return replace(bound, min_tile=max(rows // sums, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What verification over ranks says of one attention. place: what ran the kernels."""

    ranks: int
    place: str
    verdicts: tuple[tuple[RanksCase, Verdict], ...]

    @property
    def ok(self) -> bool:
        return all(verdict.ok for _, verdict in self.verdicts)

    @property
    def worst(self) -> float:
        return max((verdict.worst for _, verdict in self.verdicts), default=0.0)


def verify_on_ranks(
    source: str,
    attention: str,
    target: str,
    ranks: int,
    count: int,
    variant: str | None,
    schedule: str | None,
) -> RankReport:
    """Runs cases of a variant (the first, if none is named) on as many processes: with NCCL where there are
    as many GPUs, else gloo and kernels on the CPU. schedule: as of `ContextParallel`. Raises what a rank
    raises.
    """
    with tempfile.TemporaryDirectory(prefix="verdicts-", dir=own_folder()) as folder:
        path = Path(folder) / "verdicts.json"
        on_processes(ranks, _verify_rank, source, attention, target, variant, schedule, count, str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
    verdicts = tuple(
        (
            RanksCase(case=Case.from_json(json.dumps(row["case"])), strategy=row["strategy"]),
            Verdict(ok=row["ok"], message=row["message"], worst=row["worst"], where=row["where"]),
        )
        for row in data["cases"]
    )
    return RankReport(ranks=ranks, place=data["place"], verdicts=verdicts)


def _verify_rank(
    rank: int,
    source: str,
    attention: str,
    target: str,
    wanted: str | None,
    schedule: str | None,
    count: int,
    path: str,
) -> None:
    found = verify_here(rank, source, attention, target, count, wanted, schedule=schedule)
    if rank == 0:
        rows = [
            {"case": json.loads(made.case.to_json()), "strategy": made.strategy, "ok": verdict.ok,
             "message": verdict.message, "worst": verdict.worst, "where": verdict.where}
            for made, verdict in found.verdicts
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"place": found.place, "cases": rows}), encoding="utf-8")


def verify_here(
    rank: int,
    source: str,
    attention: str | None,
    target: str,
    count: int,
    wanted: str | None = None,
    *,
    schedule: str | None = None,
    symmetric: bool = False,
) -> RankReport:
    """Returns the verdicts on cases of a variant (the first, if none is named) in a process that is this rank
    of the default group; the same on every rank, all of which call it. schedule, symmetric: as of
    `ContextParallel`.
    """
    gpus = torch.cuda.is_available() and torch.cuda.device_count() > rank
    device = f"cuda:{rank}" if gpus else "cpu"
    variants = spec_of(source, attention, target).variants
    variant = next(variant for variant in variants if wanted in (None, variant.name))
    params: dict[str, Any] = dict(variant.params)
    cp = ContextParallel(
        source, attention=attention, target=target, schedule=schedule, symmetric=symmetric, **params
    )
    verdicts = tuple(
        (made, run_case(cp, variant, made, device))
        for made in cases(variant.attention, count, _GPU_SCALE if gpus else 1, cp.group.size)
    )
    place = torch.cuda.get_device_name(0) if gpus else f"{runner_of(target).without_gpu}, gloo"
    return RankReport(ranks=cp.group.size, place=place, verdicts=verdicts)
