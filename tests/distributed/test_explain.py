"""What a plan is in words: runs of rows, and what each strategy would take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attnc.distributed.explain import _runs, _strategies


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "none"),
        ([4], "4-4"),
        ([0, 1, 2], "0-2"),
        ([0, 1, 5, 6, 9], "0-1, 5-6, 9-9"),
        (range(0, 12, 2), "0-0, 2-2, 4-4, 6-6, 8-8, 10-10"),
        (range(0, 14, 2), "0-0, 2-2, 4-4, 6-6, 8-8, 10-10, ... (7 runs)"),
    ],
)
def test_rows_are_named_by_runs(rows: Any, text: str) -> None:
    assert _runs(np.asarray(rows, np.int64)) == text


def test_strategies_come_by_their_time_and_refused_ones_last() -> None:
    def estimate(strategy: str, total: float, refusal: str = "") -> Any:
        return SimpleNamespace(
            strategy=strategy,
            total=total,
            compute=total / 2,
            exchange=0.0,
            exposed=0.0,
            bytes=2e6,
            refusal=refusal,
        )

    every: Any = (
        estimate("heads", 0.1, "too few heads"),
        estimate("gather", 4e-3),
        estimate("mixed", 0.2, "no groups"),
        estimate("need", 3e-3),
    )
    _, *lines, chosen = _strategies(every, every[3])
    assert [line[:8].split() for line in lines] == [["*", "need"], ["gather"], ["heads"], ["mixed"]]
    assert "3.00 ms" in lines[0]
    assert "2.0 MB" in lines[0]
    assert [line.partition(": ")[2] for line in lines[2:]] == ["too few heads", "no groups"]
    assert chosen == "chosen: need, the shortest estimate, 25.0 % less than 'gather'"
    assert len([*_strategies(every[:1], every[0])]) == 2
