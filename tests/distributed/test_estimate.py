"""What strategies are expected to take: a table of calls, so that no choice between them changes unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnc.distributed.estimate import Rates, TimeEstimate, pipeline_seconds, rates_of
from attnc.distributed.explain import example
from attnc.distributed.plan import Plan, make_plan
from attnc.distributed.spans import Visibility, Widths
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.distributed.specs import SPECS

GOLDEN = Path(__file__).parent.parent / "golden" / "ranks" / "estimates.txt"
MACHINES = {
    "triton": rates_of("triton"),
    "hopper": rates_of("cuda.sm_90a"),
    "symmetric": rates_of("cuda.sm_90a", symmetric=True),
    "slow links": Rates(link=20e9, latency=100e-6),
}
CALLS = (
    ("causal", 8192, 2), ("causal", 65536, 4), ("causal", 65536, 8), ("window", 32768, 4),
    ("documents", 32768, 4), ("packed", 16384, 4), ("prefix", 16384, 3),
)  # fmt: skip


def plan_of(mask: str, length: int, ranks: int, rates: Rates) -> Plan:
    (attention,) = resolve(parse(Source(f"{mask}.attn", SPECS[mask])), prelude()).attentions
    sizes, _ = example(attention, {"M": length, "N": length})
    return make_plan(Visibility(attention), sizes, Widths(d=128, dv=128), ranks, rates)


def describe(estimate: TimeEstimate) -> str:
    times = (estimate.compute, estimate.exchange, estimate.exposed, estimate.total)
    micros = " ".join(f"{1e6 * seconds:9.1f}" for seconds in times)
    ways = f"{estimate.owners or '-'} ways {estimate.ways} groups {estimate.groups} splits {estimate.splits}"
    return (
        f"{estimate.strategy:7} {micros} us {estimate.bytes / 1e6:9.2f} MB {ways} {estimate.refusal}".rstrip()
    )


def list_estimates() -> Iterator[str]:
    for mask, length, ranks in CALLS:
        for machine, rates in MACHINES.items():
            plan = plan_of(mask, length, ranks, rates)
            yield f"{mask} {length} ranks {ranks} {machine}: {plan.chosen.strategy}"
            yield from map(describe, plan.estimates)


def test_estimates_of_calls(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN, "\n".join(list_estimates()) + "\n")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_faster_machine_never_takes_longer(groups: int) -> None:
    slow = Rates()
    given = (1e-3, 2e-4, 3e-4, 1e-4, 1e-5, groups)
    took = pipeline_seconds(*given, slow)
    for faster in (Rates(latency=0.0), Rates(launch=0.0), Rates(beside=0.0), Rates(part=0.0)):
        assert pipeline_seconds(*given, faster) <= took
    assert pipeline_seconds(1e-3, 2e-4, 0.0, 0.0, 1e-5, groups, slow) < took  # where nothing moves
