"""How long a call takes under each strategy, as far as counting goes: scores at the rate of the kernels,
bytes at that of the links.

The rates are parameters. The estimate serves the choice between strategies, so only its order matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from attnc.plan.targets import target_of

#: need: keys move to the rows that see them, no others; gather: all keys to all ranks; heads: all rows of
#: some heads meet on one rank (DeepSpeed-Ulysses); mixed: heads within groups of ranks, keys between groups.
Strategy: TypeAlias = Literal["need", "gather", "heads", "mixed"]
STRATEGIES: tuple[Strategy, ...] = ("need", "gather", "heads", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine does in a second.

    link: bytes that a GPU sends (and receives, at the same time) over all its links; latency: seconds that a
    message takes however short; compute: floating point operations of attention on one GPU; memory: bytes of
    device memory; launch: seconds between two launches of a kernel; beside: the share of its own time that an
    exchange costs a kernel it runs beside, from which NCCL takes multiprocessors; part: what each further
    part of the heads adds to the computation, with last blocks of its own. Defaults: one H200 of eight, bf16.
    """

    link: float = 350e9
    latency: float = 25e-6
    compute: float = 450e12
    memory: float = 4.0e12
    launch: float = 10e-6
    beside: float = 0.9
    part: float = 0.01


#: Floating point operations in a second of kernels that were measured, by the family of a target.
_COMPUTE = {"sm90": 650e12}


def rates_of(target: str, *, symmetric: bool = False) -> Rates:
    """Returns the rates of a target's kernels, and of copies out of symmetric memory."""
    rates = Rates(beside=0.05) if symmetric else Rates()
    compute = _COMPUTE.get(target_of(target).family)
    return rates if compute is None else replace(rates, compute=compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """What a strategy is expected to take.

    Seconds of the slowest rank: compute, alone; exchange, alone; exposed, the part of the exchange that no
    kernel hides; total. groups: parts of the heads that follow each other, so that the exchange of one part
    hides behind the kernel of another; splits: whether rows that see a rank's own keys alone are computed
    before those that wait. ways: ranks that share the heads. bytes: that move between all ranks; refusal: why
    the strategy cannot be taken, "" if it can.
    """

    strategy: Strategy
    owners: str
    ways: int
    groups: int = 1
    splits: bool = False
    compute: float = 0.0
    exchange: float = 0.0
    exposed: float = 0.0
    total: float = float("inf")
    bytes: int = 0
    refusal: str = ""


def pipeline_seconds(
    compute: float,
    ready: float,
    arriving: float,
    leaving: float,
    packing: float,
    groups: int,
    rates: Rates,
) -> float:
    """Counts the seconds of `groups` equal parts: the first arrival and the last departure are waited for,
    but for what is `ready` to be computed meanwhile; others run beside a kernel, at its cost. What arrives is
    put in order when the kernel before has ended.
    """
    if not arriving + leaving:
        return compute + rates.launch * groups
    first = arriving / groups + rates.latency + packing
    last = (leaving / groups + rates.latency) if leaving else 0.0
    hidden = (arriving + leaving) * (1.0 - 1.0 / groups)
    start = max(ready + rates.beside * arriving / groups, first) if ready else first
    compute += rates.part * (groups - 1) * compute
    busy = max(compute - ready + rates.beside * hidden, hidden + rates.latency * groups)
    return start + last + busy + rates.launch * groups * 3
