"""Attention over ranks on GPUs, in processes of their own: NCCL, streams, and kernels that are compiled."""

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessException

from attnc.api.compile import compile_family
from attnc.distributed import ContextParallel
from attnc.distributed.estimate import Strategy
from attnc.distributed.group import Alone, on_processes
from attnc.distributed.verify import RanksCase, run_case, verify_here
from attnc.verify.case import Case
from tests.distributed.specs import SPECS, text
from tests.distributed.threads import Thread, on_ranks

#: Four where there are as many GPUs.
RANKS = 4 if torch.cuda.device_count() >= 4 else 2


def wide(spec: str) -> str:
    """With heads of 64 columns, and tiles of a GPU."""
    return spec.replace("16]", "64]").replace("tile.q = 16, tile.kv = 16", "tile.q = 64")


def hopper(spec: str) -> str:
    """The same with a schedule for Hopper."""
    schedule = "backward { accumulate.dq = atomic }"
    return spec.replace("for triton", "for cuda.sm_90a").replace("tile.q = 64", schedule)


WIDE = {"causal": wide(text(dtype="bf16")), "documents": wide(SPECS["documents"])}
#: Spec and target of what is verified, and whether keys move by symmetric memory.
WORK: Mapping[str, tuple[str, str, bool]] = {
    "causal": (WIDE["causal"], "triton", False),
    "causal, copied": (WIDE["causal"], "triton", True),
    "documents": (WIDE["documents"], "triton", False),
    "window of Hopper": (hopper(wide(text("window(200, 0)", dtype="bf16"))), "cuda.sm_90a", False),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What is wrong with each, "" for nothing: found by processes that are started once."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    names = [name for name, (_, target, _) in WORK.items() if is_hopper or target == "triton"]
    folder = tmp_path_factory.mktemp("ranks")
    on_processes(RANKS, _verify, names, str(folder), seconds=60.0, deadline=240.0)
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


def _verify(rank: int, names: list[str], folder: str) -> None:
    for name in names:
        begin = time.monotonic()
        source, target, symmetric = WORK[name]
        found = verify_here(rank, source, None, target, 4, symmetric=symmetric)
        assert "NVIDIA" in found.place
        if rank == 0:
            seconds = time.monotonic() - begin
            print(f"{name}: {len(found.verdicts)} cases, {seconds:.1f} s", file=sys.stderr, flush=True)
            wrong = [f"{made}: {verdict.message}" for made, verdict in found.verdicts if not verdict.ok]
            (Path(folder) / name).write_text("\n".join(wrong), encoding="utf-8")


@pytest.mark.parametrize("name", WORK)
def test_ranks_agree_with_the_reference(name: str, verdicts: Mapping[str, str]) -> None:
    if name not in verdicts:
        pytest.skip("needs a Hopper GPU")
    assert not verdicts[name]


@pytest.mark.parametrize(("strategy", "ranks"), [("heads", 2), ("mixed", 4)])
def test_strategies_that_share_heads(strategy: Strategy, ranks: int, device: torch.device) -> None:
    """Ranks that are threads of this process, with the streams of one GPU."""
    case = Case(dims={"B": 1, "M": 280, "N": 280, "Hkv": 4, "G": 1}, seed=1)
    made = RanksCase(case=case, strategy=strategy)

    def work(group: Thread) -> tuple[str, bool]:
        cp = ContextParallel(WIDE["causal"], group)
        with torch.autograd.set_multithreading_enabled(False):  # else all ranks have one thread to go back
            verdict = run_case(cp, cp.spec.variants[0], made, str(device))
        assert cp.strategy == strategy, "it is possible here"
        return verdict.message, verdict.ok

    for message, ok in on_ranks(ranks, work):
        assert ok, message


def test_one_rank_has_the_bits_of_the_kernel(device: torch.device) -> None:
    """What ranks run, on one GPU: the derived kernels."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(2, 500, heads, 64, generator=generator, device=device).bfloat16() for heads in (4, 2, 2)
    )
    cp = ContextParallel(WIDE["causal"], Alone())
    own = [x.requires_grad_() for x in cp.shard(q, k, v)]
    o, lse = cp(*own)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = compile_family(WIDE["causal"], target="triton", warn=False)(*leaves)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
    do = torch.randn_like(o)
    for found, want in zip(
        torch.autograd.grad(o, own, do), torch.autograd.grad(expected[0], leaves, do), strict=True
    ):
        assert torch.equal(found, want)


@pytest.mark.parametrize("fault", ["dies", "is slow"])
def test_nobody_waits_longer_than_the_time_out(fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch's watchdog ends the ranks that wait, and says where."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    begin = time.monotonic()
    with pytest.raises(ProcessException) as failure:
        on_processes(RANKS, _wait_for_one, fault, seconds=10.0, deadline=120.0)
    assert failure.value.error_index != 1, "the others fail, each by itself"
    said = [line for line in capfd.readouterr().err.splitlines() if "Watchdog caught" in line]
    ranks = sorted({int(found[1]) for line in said if (found := re.search(r"Rank (\d+)\] Watchdog", line))})
    assert set(ranks) <= set(range(RANKS)) - {1}
    seconds = f"{time.monotonic() - begin:.0f} s, of which 10 are the time-out"
    print(f"{fault}: {seconds}; ranks {ranks} of {RANKS}: {said[:1]}", file=sys.stderr)


def _wait_for_one(rank: int, fault: str) -> None:
    cp = ContextParallel(WIDE["causal"])
    rows = 8192  # so many that each rank waits for keys of the other
    shards = cp.shard(*(torch.ones(1, rows, heads, 64, device="cuda").bfloat16() for heads in (2, 1, 1)))
    with torch.no_grad():
        cp(*shards)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(90.0 * (fault == "is slow"))
            os._exit(0)
        cp(*shards)
        torch.cuda.synchronize()
