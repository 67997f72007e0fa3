"""What a group is of, and how long its processes are waited for."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from attnc.distributed import group as groups
from attnc.distributed.group import Group, _join


def test_processes_are_waited_for_up_to_a_deadline() -> None:
    for deadline in (None, 1000.0):
        running: Any = Mock(join=Mock(side_effect=[False, False, True]), processes=[Mock()])
        _join(running, deadline)
        assert running.join.call_count == 3
        assert all((call.kwargs["timeout"] is None) == (deadline is None) for call in running.join.mock_calls)
        running.processes[0].kill.assert_not_called()
    running = Mock(join=Mock(return_value=False), processes=[Mock(), Mock()])
    with pytest.raises(TimeoutError, match="ranks were still running after 0 seconds"):
        _join(running, 0.0)
    for process in running.processes:
        process.kill.assert_called_once()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_is_shared_where_it_is_asked_for_and_there_are_others(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = Mock(get_rank=Mock(return_value=0), get_world_size=Mock(return_value=size))
    monkeypatch.setattr(groups, "dist", made)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for symmetric in (False, True):
        assert Group(symmetric=symmetric).symmetric == (symmetric and size > 1)
