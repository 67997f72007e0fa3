"""Windows of keys that rows of a rank are computed against: what they leave out, and when they are kept."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnc.distributed import ContextParallel, views
from attnc.distributed.derive import View
from attnc.distributed.estimate import Rates
from attnc.distributed.offers import Chunks, even_out
from attnc.distributed.plan import RowGroup
from attnc.distributed.verify import RanksCase, run_case
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.verdict import Verdict
from tests.distributed.specs import SPECS, text
from tests.distributed.test_engine import whole
from tests.distributed.test_stages import SLOW_LINKS
from tests.distributed.threads import Thread, on_ranks

ensure_interpreter()

FAR = text(
    "causal and doc[b, q_pos] == doc[b, kv_idx]",
    score="dot(q, k) / sqrt(D) + pair[h, q_idx, kv_idx] + own[b, kv_idx]",
    inputs=("doc: i32[B, N] is sorted", "pair: f32[H, M, N]", "own: f32[B, N]"),
    grads=", pair, own",
    heads="H",
)


@pytest.mark.parametrize(
    ("spec", "dims", "seed"),
    [
        (FAR, {"B": 1, "M": 190, "N": 190, "H": 2}, 14),
        (text("causal", packed=True), {"B": 4, "M": 190, "N": 190, "Hkv": 1, "G": 1}, 13),
    ],
    ids=["documents", "packed"],
)
def test_tiles_of_keys_between_those_that_rows_see_are_left_out(
    spec: str, dims: Mapping[str, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of two ranks lie far apart."""
    monkeypatch.setattr("attnc.distributed.plan.TILE", 16)

    def owners(chunks: Chunks, *_: object) -> dict[str, npt.NDArray[np.int64]]:
        return {"far": np.arange(len(chunks.work)) * 6 // len(chunks.work) % 2}

    monkeypatch.setattr("attnc.distributed.plan.assignments", owners)

    def work(group: Thread) -> tuple[Verdict, int]:
        cp = ContextParallel(spec, group, keep_keys=spec is FAR)
        made = RanksCase(case=Case(dims=dims, seed=seed), strategy="need")
        verdict = run_case(cp, cp.spec.variants[0], made)
        assert cp._plan is not None
        return verdict, sum(part.hi - part.lo - len(part.keys) for part in cp._plan.parts(group.rank))

    found = on_ranks(2, work)
    assert found[0][0].ok, found[0][0].message
    assert any(left_out >= 32 for _, left_out in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mask", "inputs", "groups", "rates"),
    [
        ("window(40, 0)", (), 1, SLOW_LINKS),
        ("0 <= kv_idx - q_pos <= 40", ("own: f32[B, N]",), 2, Rates()),
    ],
)
def test_rows_that_see_keys_far_from_those_of_others_are_computed_apart(
    mask: str, inputs: tuple[str, ...], groups: int, rates: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of a window, dealt out for even work, or its last ones."""
    monkeypatch.setattr("attnc.distributed.plan.TILE", 16)
    monkeypatch.setattr("attnc.distributed.plan._APART", 32)

    def owners(chunks: Chunks, ranks: int, *_: object) -> dict[str, npt.NDArray[np.int64]]:
        found = even_out(chunks, ranks)
        assert found is not None
        return {"evened": found}

    monkeypatch.setattr("attnc.distributed.plan.assignments", owners)
    score = "dot(q, k) / sqrt(D)" + " + own[b, kv_idx]" * bool(inputs)
    spec = text(mask, score=score, inputs=inputs, grads=", own" * bool(inputs))

    def work(group: Thread) -> tuple[Verdict, float, list[RowGroup]]:
        cp = ContextParallel(spec, group, rates=rates, groups=groups)
        dims = {"B": 2, "M": 288, "N": 288, "Hkv": 2, "G": 1}
        verdict = run_case(cp, cp.spec.variants[0], RanksCase(case=Case(dims=dims, seed=3), strategy="need"))
        plan = cp._current()
        return verdict, plan.imbalance, list(plan.parts(group.rank))

    found = on_ranks(3, work)
    assert found[0][0].ok, found[0][0].message
    assert found[0][1] < 1.06, "few chunks, of which none is divided"
    waiting = [[part for part in parts if not part.ready] for *_, parts in found]
    assert max(map(len, waiting)) == 2
    first, second = max(waiting, key=len)
    assert first.hi + 32 <= second.lo + 16
    assert second.at == len(first.keys)


def test_rows_that_see_nothing_are_far_from_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are more queries than keys, or sequences end early."""
    monkeypatch.setattr("attnc.distributed.plan.TILE", 16)
    monkeypatch.setattr("attnc.distributed.plan._APART", 32)

    def owners(chunks: Chunks, *_: object) -> dict[str, npt.NDArray[np.int64]]:
        return {"in turns": np.arange(len(chunks.work)) % 2}

    monkeypatch.setattr("attnc.distributed.plan.assignments", owners)

    def work(group: Thread) -> tuple[Verdict, list[RowGroup]]:
        cp = ContextParallel(text("window(8, 0)"), group, rates=SLOW_LINKS)
        dims = {"B": 1, "M": 288, "N": 96, "Hkv": 1, "G": 1}
        verdict = run_case(cp, cp.spec.variants[0], RanksCase(case=Case(dims=dims, seed=3), strategy="need"))
        return verdict, list(cp._current().parts(group.rank))

    for verdict, parts in on_ranks(2, work):
        assert verdict.ok, verdict.message
        assert all(part.lo <= part.hi and part.at >= 0 for part in parts)


def test_what_a_plan_depends_on_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all layers and their gradients, unless it is another tensor, or was written to."""
    made: list[str] = []

    def view_of(view: View, *given: Any) -> torch.Tensor:
        made.append(view.tensor)
        return views.view_of(view, *given)

    monkeypatch.setattr("attnc.distributed.stages.view_of", view_of)

    def work(group: Thread) -> list[int]:
        cp = ContextParallel(SPECS["documents"], group, strategy="need")
        doc = torch.arange(45).int()[None] // 20
        leaves = [x.requires_grad_() for x in cp.shard(*whole(), doc=doc)[:3]]
        counts, results = [], []
        for number in range(5):
            given = doc.clone() if number == 2 else doc.add_(0) if number == 4 else doc
            before = len(made)
            o, _ = cp(*leaves, doc=given)
            results.append(torch.autograd.grad(o.sum(), leaves))
            counts.append(len(made) - before)
        assert all(torch.equal(x, y) for found in results for x, y in zip(found, results[0], strict=True))
        return counts

    first, *others = on_ranks(1, work)[0]
    assert first == 2, "of queries and of keys"
    assert others == [0, 2, 2, 2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "groups", "least"), [("causal", 2, 0.1), ("window", 1, 2.0), ("sink", 1, 2.0)]
)
def test_keys_may_be_kept_for_the_gradients(
    name: str, groups: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they are sent once, and the bits are the same; by default up to a share of what is kept anyway."""
    monkeypatch.setattr("attnc.distributed.stages.KEPT", least)

    def work(group: Thread, *, keeps: bool | None) -> tuple[int, float, tuple[torch.Tensor, ...]]:
        cp = ContextParallel(SPECS[name], group, groups=groups, strategy="need", keep_keys=keeps)
        extras: dict[str, Any] = {"sink": torch.ones(4)} if name == "sink" else {}
        leaves = [x.requires_grad_() for x in cp.shard(*whole(), **extras)[:3]]
        o, lse = cp(*leaves, **extras)
        made = (o, lse, *torch.autograd.grad(o.sum(), leaves))
        return group.bytes_sent, cp._current().kept_share, made

    kept, fetched, usual = (on_ranks(2, partial(work, keeps=keeps)) for keeps in (True, False, None))
    for (*_, mine), (*_, other) in zip(kept, fetched, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))
    fewer, more, sent = (sum(count for count, *_ in found) for found in (kept, fetched, usual))
    assert fewer < more
    assert sent == (fewer if usual[0][1] <= least else more)
    assert 0.1 < usual[0][1] < 2.0
