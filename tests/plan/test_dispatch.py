"""Tables of dispatch: the file, and what of it a projection's module embeds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnc.build import compile_program, front, plan_program
from attnc.diagnostics import DiagnosticError
from attnc.plan.dispatch import (
    PROJECTION_SIZES,
    Row,
    Table,
    admits,
    dump_tables,
    load_tables,
    projection_rows,
)
from attnc.plan.ir_projection import ProjectionModule
from attnc.source import Source

SPEC = Path(__file__).parents[2] / "specs" / "llama_7b.attn"


@pytest.fixture(scope="module")
def module() -> ProjectionModule:
    return plan_program(front(SPEC)).projections[0]


def table(module: ProjectionModule, *rows: tuple[int | None, int], toolchain: str = "triton 3.6.0") -> Table:
    return Table(
        name=module.name,
        target=module.target,
        variant=module.variant.name,
        device="NVIDIA H200",
        toolchain=toolchain,
        sizes=PROJECTION_SIZES,
        rows=tuple(
            Row(limits=(limit,), choice=module.points[at].knobs(), microseconds=12.346) for limit, at in rows
        ),
        notes=("gemv up to M = 1",),
    )


def test_tables_survive_the_file(module: ProjectionModule) -> None:
    tables = (table(module, (2, 0), (None, 3)),)
    assert load_tables(Source("t.json", dump_tables(tables))) == (
        replace(tables[0], rows=tuple(replace(row, microseconds=12.35) for row in tables[0].rows)),
    )


def test_a_newer_measurement_replaces_the_older(module: ProjectionModule) -> None:
    text = dump_tables([table(module, (None, 1)), table(module, (None, 2))])
    (kept,) = load_tables(Source("t.json", text))
    assert kept.rows[0].choice == module.points[2].knobs()


def test_the_newest_toolchain_speaks_and_the_last_row_is_open(module: ProjectionModule) -> None:
    tables = [
        table(module, (4, 5), (None, 1), toolchain="triton 3.10.0"),
        table(module, (None, 2), toolchain="triton 3.9.1"),
    ]
    assert projection_rows(module, tables) == {"NVIDIA H200": ((4, 5), (None, 1))}


def test_configs_that_are_gone_are_dropped(module: ProjectionModule) -> None:
    gone = Row(limits=(8,), choice={"impl": "flat", "tile.n": "7"}, microseconds=1.0)
    known = table(module, (4, 5), (None, 1))
    tables = [replace(known, rows=(known.rows[0], gone, known.rows[1]))]
    assert projection_rows(module, tables) == {"NVIDIA H200": ((4, 5), (None, 1))}


def test_rows_are_embedded(module: ProjectionModule) -> None:
    last = len(module.points) - 1
    text = Source("t.json", dump_tables([table(module, (2, 0), (None, last))]))
    compiled = compile_program(front(SPEC), "llama_7b.attn", None, text)
    page = next(o.text for o in compiled.outputs if o.path == "qkv_proj/triton/default.py")
    assert (
        f'    # gemv up to M = 2, then conventional\n    "NVIDIA H200": ((2, 0), (None, {last})),\n' in page
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format=2),
        lambda data: data["tables"][0]["rows"][0].update(limits=[4]),
        lambda data: data["tables"][0]["rows"][0].update(limits=["x"]),
        lambda data: data["tables"][0].update(rows=[]),
        lambda data: data["tables"][0].pop("device"),
    ],
)
def test_other_files_are_refused(module: ProjectionModule, change: object) -> None:
    data = json.loads(dump_tables([table(module, (None, 1))]))
    assert callable(change)
    change(data)
    with pytest.raises(DiagnosticError) as failure:
        load_tables(Source("t.json", json.dumps(data)))
    assert [diagnostic.code for diagnostic in failure.value.diagnostics] == ["E0603"]


def test_rows_admit_what_is_within_every_limit() -> None:
    assert admits((16, None, 64), (16, 1 << 20, 1))
    assert not admits((16, None, 64), (17, 1, 1))
