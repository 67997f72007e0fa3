"""The engine on torch.distributed: two processes over gloo."""

import json
import os
import re
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from attnc.cli import main
from attnc.distributed import ContextParallel, group
from attnc.distributed.group import Group, _join, on_processes
from tests.distributed.specs import SPECS


@pytest.mark.slow
def test_two_processes_agree_with_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that people run, of a spec whose element type is a param."""
    path = tmp_path / "small.attn"
    path.write_text(SPECS["types"], encoding="utf-8")
    assert main(["verify", str(path), "--ranks", "2", "--count", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["attention"], found["ranks"], found["ok"]) == ("small", 2, True)
    assert [row["ok"] for row in found["cases"]] == [True, True]
    assert 0 < found["worst"] < 1


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["dies", "is slow"])
def test_a_rank_that_does_not_come_is_named_on_the_others(tmp_path: Path, fault: str) -> None:
    """With the collective, after the time-out of the group at the latest: nobody waits without end."""
    on_processes(3, _wait_for_one, fault, str(tmp_path), seconds=8.0, deadline=300.0)
    for rank in (0, 1):
        said = (tmp_path / str(rank)).read_text(encoding="utf-8")
        assert re.match(
            r"all_\w+, call \d+ of the 3 ranks: rank 2 ended, or did not come to it in time: ", said
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64])
def test_a_group_moves_elements_of_any_type(alone: Group, dtype: torch.dtype) -> None:
    sent = torch.arange(10).to(dtype)
    received = torch.zeros(10, dtype=dtype)
    alone.exchange(received, [10], sent, [10])()
    assert torch.equal(received, sent)
    alone.exchange(received[:0], [0], sent[:0], [0])()
    matrix = sent.view(2, 5).T
    assert torch.equal(alone.gather(matrix), matrix[None])
    assert (alone.rank, alone.size, alone.symmetric) == (0, 1, False)


def test_a_failure_says_which_call_it_was(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3)
    alone.exchange(x, [3], x.clone(), [3])()
    alone.gather(x)
    monkeypatch.setattr(group, "all_gather", Mock(side_effect=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match=r"all_gather, call 3 of the 1 ranks.*broken"):
        alone.gather(x)
    with pytest.raises(RuntimeError, match="all_to_all, call 4 of the 1 ranks"):
        alone.exchange(x, [2], x, [3])()


def _wait_for_one(rank: int, fault: str, folder: str) -> None:
    cp = ContextParallel(SPECS["causal"])
    shards = cp.shard(*(torch.ones(1, 48, heads, 16) for heads in (2, 1, 1)))
    with torch.no_grad():
        cp(*shards)
        if rank == 2:
            deadline = time.monotonic() + 120 * (fault == "is slow")  # at which the test fails
            while not all(Path(folder, other).is_file() for other in "01") and time.monotonic() < deadline:
                time.sleep(0.1)
            os._exit(0)
        try:
            cp(*shards)
        except RuntimeError as failure:
            written = Path(folder, f"{rank}.part")
            written.write_text(str(failure), encoding="utf-8")
            written.rename(Path(folder, str(rank)))
            os._exit(0)  # the group cannot be left in good order


def test_a_collective_that_fails_says_which_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks two have said that theirs failed, too; where the store has ended, it is the first one."""
    group = Group.__new__(Group)
    group.rank, group.size, group.axis, group.group = 0, 4, "cp", Mock(group_name="7")
    group._calls = 4
    known = {"attnc/7/5/2"}
    store = Mock(set=lambda name, value: known.add(name), check=lambda names: known.issuperset(names))
    monkeypatch.setattr("attnc.distributed.group._ROLL_CALL", 0.1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    lost = Mock(side_effect=RuntimeError("Connection closed by peer"))
    monkeypatch.setattr(dist, "all_to_all_single", lost)
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"^all_to_all, call 5 of the 4 ranks of cp: ranks 1, 3 ended, or"):
        group.exchange(x, [1] * 4, x, [1] * 4)()
    ended = Mock(set=Mock(side_effect=RuntimeError("no host")))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: ended)
    with pytest.raises(RuntimeError, match=r"call 6 .*: rank 0 ended, or"):
        group.exchange(x, [1] * 4, x, [1] * 4)()
    lost.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        group.exchange(x, [1] * 4, x, [1] * 4)()


def test_ranks_that_say_so_late_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have seconds, and nobody waits for more than the last of them."""
    late = Group.__new__(Group)
    late.rank, late.size, late.axis, late.group, late._calls = 0, 3, "", Mock(group_name="7"), 0
    looks = iter([{0}, {0}, {0, 1}, {0, 1, 2}])
    known = set[int]()

    def check(names: list[str]) -> bool:
        rank = int(names[0].rpartition("/")[2])
        if rank == 0:
            known.update(next(looks))
        return rank in known

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: Mock(check=check))
    monkeypatch.setattr(time, "sleep", Mock())
    monkeypatch.setattr(dist, "all_to_all_single", Mock(side_effect=RuntimeError("broken")))
    x = torch.zeros(3)
    with pytest.raises(
        RuntimeError, match=r"^all_to_all, call 1 of the 3 ranks: it failed on every rank: broken"
    ):
        late.exchange(x, [1] * 3, x, [1] * 3)()
    assert next(looks, None) is None


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"), [(0, 1, False), (2, 2, True), (2, 3, False), (4, 2, True)]
)
def test_every_rank_has_a_gpu_or_none(
    gpus: int, ranks: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert group.uses_gpus(ranks) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not group.uses_gpus(ranks)


def test_memory_that_others_copy_from_grows(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody copies out of the one before when there is another."""
    monkeypatch.setattr(torch.cuda, "synchronize", wait := Mock())
    monkeypatch.setattr(group, "SymmetricBox", lambda of, size, ranks: Mock(memory=torch.zeros(size)))
    first = alone.outbox(16)
    assert alone.outbox(16) is alone.outbox(8) is first
    second = alone.outbox(17)
    assert (second.memory.numel(), wait.call_count) == (17, 2)


def test_one_rank_copies_from_nobody(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert alone.size == 1
    assert not Group(symmetric=True).symmetric


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_ranks_that_end_one_after_the_other_are_waited_for(deadline: float | None) -> None:
    running = Mock(join=Mock(side_effect=[False, False, True]))
    _join(running, deadline)
    assert running.join.call_count == 3
    assert running.processes.mock_calls == []


def test_ranks_that_do_not_end_are_ended() -> None:
    running = Mock(join=Mock(return_value=False), processes=[Mock(), Mock()])
    with pytest.raises(TimeoutError, match="ranks were still running after 0 seconds"):
        _join(running, 0.0)
    assert [process.kill.call_count for process in running.processes] == [1, 1]


@pytest.mark.parametrize("has_gpus", [False, True])
def test_processes_interpret_where_there_are_no_gpus(has_gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else: what they are told is there as they start."""
    told = dict[str, str]()

    def spawn(*_: object, **__: object) -> Mock:
        told.update(os.environ)
        return Mock()

    monkeypatch.setattr(sys.modules["torch.multiprocessing.spawn"], "spawn", spawn)
    monkeypatch.setattr(group, "uses_gpus", lambda ranks: has_gpus)
    for name in ("TRITON_INTERPRET", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    on_processes(1, _wait_for_one)
    assert told.get("TRITON_INTERPRET") == (None if has_gpus else "1")
    assert told["PYTHONSAFEPATH"] == "1"


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that were set to nothing too; processes get what is meant where there is none."""
    monkeypatch.setattr(sys.modules["torch.multiprocessing.spawn"], "spawn", Mock())
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "")
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    before = dict(os.environ)
    on_processes(1, _wait_for_one)
    assert dict(os.environ) == before
