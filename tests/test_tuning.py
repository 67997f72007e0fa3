"""From times to tables of dispatch, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.build import dispatch_source
from attnc.model.projection import Impl
from attnc.plan.ir.projection import ProjectionModule
from attnc.runtime.timing import summarise
from attnc.tune.configs import fastest
from attnc.tune.projections import table_of as projection_table
from attnc.tune.schedules import Point
from attnc.tune.schedules import table_of as schedule_table
from attnc.tuned.crossover import crossovers
from attnc.tuned.tables import admits, load_tables, projection_rows
from tests.plans import plans_of

SPECS = Path(__file__).parent.parent / "specs"


@pytest.fixture(scope="module")
def module() -> ProjectionModule:
    return plans_of(SPECS / "llama_7b.attn").projections[0]


def test_rows_with_one_choice_are_joined_and_torch_has_the_rest(module: ProjectionModule) -> None:
    flat = next(at for at, config in enumerate(module.configs) if config.impl == "flat")
    last = len(module.configs) - 1
    best: dict[int, dict[Impl, tuple[int, float]]] = {
        1: {"gemv": (0, 1.0), "flat": (flat, 2.0), "conventional": (last, 3.0)},
        2: {"gemv": (0, 3.0), "flat": (flat, 2.0), "conventional": (last, 3.0)},
        4: {"flat": (flat, 2.0), "conventional": (last, 3.0)},
        8: {"flat": (flat + 1, 2.0), "conventional": (last, 3.0)},
    }
    found = crossovers({M: {impl: time for impl, (_, time) in row.items()} for M, row in best.items()})
    table = projection_table(module, best, found, "a GPU", "triton 3.6.0")
    assert [row.limits for row in table.rows] == [(1,), (4,), (8,), (None,)]
    rows = ((1, 0), (4, flat), (8, flat + 1), (None, last))
    assert projection_rows(module, [table]) == {"a GPU": rows}
    assert table.notes[0] == "M1 = 2, M2 = none"


def test_the_committed_tables_name_configs_that_exist() -> None:
    path = SPECS / "llama_7b.attn"
    source = dispatch_source(path)
    assert source is not None
    tables = load_tables(source)
    for module in plans_of(path).projections:
        (table,) = (table for table in tables if table.name == module.name)
        assert len(projection_rows(module, tables)[table.device]) == len(table.rows)


def test_a_config_is_chosen_that_gains_more_than_chance() -> None:
    def chosen(*milliseconds: float) -> str:
        return fastest({str(at): summarise([time] * 5) for at, time in enumerate(milliseconds) if time})

    assert chosen(1.0, 0.98, 0.99) == "1"
    assert chosen(1.0, 0.995, 0.998) == "0"
    assert chosen(0.0, 1.0, 0.995) == "1"  # the first did not run


def test_every_point_of_the_grid_gets_its_fastest_schedule() -> None:
    points = [
        Point(
            M=M,
            N=N,
            B=B,
            heads=8,
            kv_heads=2,
            microseconds={"split": float(M), "rows": 40.0 if N == 1024 else 9.0 * B},
        )
        for B in (1, 16)
        for N in (1024, 8192)
        for M in (1, 16, 64)
    ]
    table = schedule_table("extend", "d128", points, "a GPU", "triton 3.6.0")
    for point in points:
        sizes = (point.M, point.N, point.B * point.heads)
        choice = next(row.choice["schedule"] for row in table.rows if admits(row.limits, sizes))
        assert choice == point.fastest
    beyond = next(row for row in table.rows if admits(row.limits, (10**6, 10**6, 10**6)))
    assert beyond.limits == (None, None, None)
