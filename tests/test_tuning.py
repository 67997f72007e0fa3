"""From times to tables of dispatch, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnc.build import dispatch_path, dispatch_source, tuned_of, tuned_path
from attnc.model.program import Impl
from attnc.plan import ir
from attnc.plan.layout import Which
from attnc.plan.projection import ProjectionModule
from attnc.runtime.timing import summarise
from attnc.tune import NothingRuns, configs, in_processes, projections, schedules, targets
from attnc.tune.configs import fastest
from attnc.tune.projections import crossovers
from attnc.tune.projections import table_of as projection_table
from attnc.tune.schedules import Point
from attnc.tune.schedules import table_of as schedule_table
from attnc.tune.targets import TargetPoint
from attnc.tuned.choices import BUCKETS, TunedChoice
from attnc.tuned.tables import ChoiceTable, TableRow, known_tables, load_tables, projection_rows
from tests.plans import SPECS, plans_of
from tests.refusals import refused
from tests.tables import choice, deciding


@pytest.fixture(scope="module")
def module() -> ProjectionModule:
    return plans_of("llama_7b").projections[0]


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
        taken = choice(table.rows, point.M, point.N, point.B * point.heads)
        assert taken["schedule"] == point.fastest
    assert deciding(table.rows, 10**6, 10**6, 10**6).limits == (None, None, None)


# --- targets of one import ----------------------------------------------------------------------------------


def target_point(N: int, M: int = 1, BH: int = 16, *, gradients: bool = False, **times: float) -> TargetPoint:
    named = {"hopper": "cuda.sm_90a", "ampere": "cuda.sm_80", "triton": "triton"}
    microseconds = {named[name]: time for name, time in times.items()}
    return TargetPoint(M=M, N=N, BH=BH, gradients=gradients, microseconds=microseconds)


@pytest.fixture
def table_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ChoiceTable]:
    monkeypatch.setattr(targets, "toolchain_of", lambda target: SimpleNamespace(version=lambda: "triton 3.6"))

    def make(spec: str, *points: TargetPoint) -> ChoiceTable:
        return targets.target_table(plans_of(spec).modules[:1], points, "a GPU")

    return make


def test_a_target_is_taken_for_the_sizes_that_are_nearest(table_for: Callable[..., ChoiceTable]) -> None:
    found = table_for(
        "decode",
        *(target_point(N, M=M, BH=BH, hopper=2.0, triton=1.0 + (M > 1) + (N > 1024) * 3)
          for N in (1024, 4096) for M in (1, 8) for BH in (16, 256)),
    )  # fmt: skip

    def picked(*sizes: int) -> str:
        return choice(found.rows, *sizes, 0)["target"]

    assert picked(1, 1024, 16) == picked(2, 2047, 32) == picked(1, 1, 10**6) == "triton"
    assert picked(3, 1024, 16) == picked(1, 2049, 16) == picked(1, 10**6, 10**6) == "cuda.sm_90a"


def test_a_target_that_gains_no_more_than_chance_is_not_taken() -> None:
    assert target_point(1, triton=1.0, hopper=1.01).fastest == "cuda.sm_90a"
    assert target_point(1, triton=1.0, hopper=1.03).fastest == "triton"


def test_rows_that_later_ones_decide_alike_are_left_out(table_for: Callable[..., ChoiceTable]) -> None:
    points = (target_point(N, M=N, BH=16384 // N, gradients=gradients, hopper=1.0, triton=2.0)
              for gradients in (False, True) for N in (256, 1024))  # fmt: skip
    (row,) = table_for("causal_gqa", *points).rows
    assert row.limits == (None, None, None, None)


def test_gradients_have_rows_of_their_own(table_for: Callable[..., ChoiceTable]) -> None:
    points = (target_point(256, gradients=False, hopper=1.0, triton=2.0),
              target_point(256, gradients=True, hopper=2.0, triton=1.0))  # fmt: skip
    rows = table_for("causal_gqa", *points).rows
    assert [(row.limits, row.choice["target"]) for row in rows] == [
        ((None, None, None, 0), "cuda.sm_90a"),
        ((None, None, None, None), "triton"),
    ]


def test_what_is_measured_is_what_a_call_is_chosen_by() -> None:
    """A decode kernel takes drafts too, and packed sequences are chosen by the rows of all of them."""
    (decode, *_), (packed, *_) = (plans_of(name).modules for name in ("decode", "varlen"))
    assert {(size.M, size.B) for size in targets.sizes_of([decode])} == {(1, 1), (1, 16), (8, 1), (8, 16)}
    assert {size.B for size in targets.sizes_of([packed])} == {4}


@pytest.mark.parametrize("tuner", ["configs", "schedules", "projections", "targets"])
def test_a_malformed_file_is_refused_before_anything_is_measured(tuner: str, tmp_path: Path) -> None:
    """There is no GPU here: what measures fails otherwise."""
    spec = tmp_path / "causal_gqa.attn"
    spec.write_bytes((SPECS / "causal_gqa.attn").read_bytes())
    file = tuned_path(spec) if tuner == "configs" else dispatch_path(spec)
    file.parent.mkdir()
    file.write_bytes(b"\xff{")
    tuners: dict[str, Callable[..., object]] = {
        "configs": configs.tune,
        "schedules": schedules.tune_schedules,
        "projections": projections.tune_projections,
        "targets": targets.tune_targets,
    }
    assert refused(tuners[tuner], spec, 3, str).code == "E0603"


def test_a_process_that_dies_while_caches_are_filled_stops_nothing() -> None:
    in_processes(os._exit, [(3,), (0,)], 1)


# --- what was measured is not lost --------------------------------------------------------------------------


def after_one(first: object) -> Callable[..., object]:
    """A measurement that is interrupted when it comes to the second of what it measures."""
    made = iter([first])

    def measure(*_: object, **__: object) -> object:
        for found in made:
            return found
        raise KeyboardInterrupt

    return measure


def table_named(name: str) -> ChoiceTable:
    return ChoiceTable(
        name=name,
        target="triton",
        variant="",
        device="a GPU",
        toolchain="triton 3.6.0",
        sizes=("M",),
        rows=(TableRow(limits=(None,), choice={}, microseconds=1.0),),
    )


@pytest.mark.parametrize("tuner", ["schedules", "projections", "targets"])
def test_tables_are_written_as_they_are_measured(
    tuner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "causal_gqa.attn"
    spec.write_bytes((SPECS / "causal_gqa.attn").read_bytes())
    found = SimpleNamespace(table=table_named("first"))
    modules = plans_of("causal_gqa").modules[:2]
    tuners: dict[str, tuple[object, Callable[..., object], dict[str, object]]] = {
        "schedules": (
            schedules,
            schedules.tune_schedules,
            {"families": lambda path: [modules, modules], "_tune": after_one(found)},
        ),
        "projections": (
            projections,
            projections.tune_projections,
            {
                "_list_fixed": lambda path: plans_of("llama_7b").projections[:2],
                "_compile_all": lambda path: None,
                "_tune": after_one(found),
            },
        ),
        "targets": (
            targets,
            targets.tune_targets,
            {
                "target_families": lambda path: [modules, modules],
                "in_processes": lambda *jobs: None,
                "sizes_of": lambda family: [],
                "device_name": lambda: "a GPU",
                "target_table": after_one(found.table),
            },
        ),
    }
    where, tune, fakes = tuners[tuner]
    for name, fake in fakes.items():
        monkeypatch.setattr(where, name, fake)
    with pytest.raises(KeyboardInterrupt):
        tune(spec, 3, lambda line: None)
    assert [table.name for table in known_tables(dispatch_path(spec))] == ["first"]


def test_choices_are_written_as_variants_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buckets of the first variant; that of the second which was measured is not one without others."""
    spec = tmp_path / "causal_gqa.attn"
    spec.write_bytes((SPECS / "causal_gqa.attn").read_bytes())
    measured: list[str] = []

    def measure(
        module: ir.Module, kernel: Which, tensors: object, bucket: int | None, rounds: int
    ) -> configs.Winner:
        if len(measured) == len(BUCKETS) + 1:
            raise KeyboardInterrupt
        measured.append(module.variant.name)
        made = TunedChoice(
            target=module.target,
            attention=module.variant.attention.name,
            variant=module.variant.name,
            device="a GPU",
            toolchain="triton 3.6.0",
            kv_len=bucket,
            config={},
            microseconds=1.0,
        )
        return configs.Winner(choice=made, gain=1.0)

    monkeypatch.setattr(configs, "_compile_all", lambda *given: None)
    monkeypatch.setattr(configs, "problem_for", lambda *given: None)
    monkeypatch.setattr(configs, "_tune_kernel", measure)
    with pytest.raises(KeyboardInterrupt):
        configs.tune(spec, 3, lambda line: None, ["forward"])
    assert [(found.variant, found.kv_len) for found in tuned_of(spec)] == [
        (measured[0], length) for length in BUCKETS
    ]


def test_no_config_that_runs_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise ValueError("too much shared memory")

    monkeypatch.setattr(configs, "_trial", broken)
    module = plans_of("causal_gqa").modules[0]
    expected = r"no config of forward of causal_gqa \w+ runs on this device: too much shared memory"
    with pytest.raises(NothingRuns, match=expected):
        configs._tune_kernel(module, "forward", (), None, 3)
