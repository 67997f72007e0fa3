"""How long processes of a group are waited for."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from attnc.distributed.group import _join


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
