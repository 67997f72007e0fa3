"""`attnc tune --points`, with times that no GPU measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnc.plan import ir
from attnc.runtime.timing import Timing, summarise
from attnc.source import Source
from attnc.tuned.tables import load_tables
from tests.cli.conftest import TINY, Run
from tests.tables import choice

SCHEDULE = "\nschedule tiny for triton as {name} {{\n  loops = [{loops}]\n  tile.q = {rows}\n}}\n"


class Clock:
    """In place of inputs on a GPU: what is timed is the microseconds that it has for a schedule."""

    copies, heads, kv_heads = 2, 16, 4

    def __init__(self, module: ir.Module, M: int, N: int, B: int) -> None:
        self.times = {"short": 1.0 + M, "long": 30.0 + N / 1024}

    def graph(self, module: ir.Module, choices: Iterable[object]) -> float:
        return self.times[str(module.label)]


def read(graphs: Mapping[str, float], rounds: int, sample_ms: float) -> dict[str, Timing]:
    return {label: summarise([time * Clock.copies / 1e3] * rounds) for label, time in graphs.items()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, fake: Callable[..., object]) -> None:
        monkeypatch.setattr(f"attnc.{name}", fake)

    install("cli.tune.need_gpu", lambda: None)
    install("tune.schedules.Sized", Clock)
    install("tune.schedules.interleave", read)
    install("tune.schedules.device_name", lambda: "a GPU")
    install("tune.schedules.toolchain_of", lambda target: SimpleNamespace(version=lambda: "triton 3.6.0"))


def spec(path: Path) -> Path:
    """A spec with one attention, one variant and two schedules."""
    attention = TINY[: TINY.index("schedule")].replace(
        "T in {f16, bf16}, W in {16, 32}", "T in {f16}, W in {16}"
    )
    short, long = (
        SCHEDULE.format(name=name, loops=loops, rows=rows)
        for name, loops, rows in (("short", "kv", 16), ("long", "q, kv", 64))
    )
    path.write_text(attention + short + long, encoding="utf-8")
    return path


@pytest.mark.usefixtures("clock")
def test_every_point_is_written_and_the_table_takes_the_fastest(folder: Path, run: Run) -> None:
    path = spec(folder / "specs" / "two.attn")
    assert run("tune", "specs/two.attn", "--points", "points.json", "--rounds", "3").code == 0
    record = json.loads((folder / "points.json").read_text(encoding="utf-8"))
    assert record["spec"] == "specs/two.attn, f16_w16, 16 query heads, 4 K/V heads"
    assert (record["device"], record["toolchain"]) == ("a GPU", "triton 3.6.0")
    assert {
        "M": 16,
        "N": 8192,
        "B": 16,
        "heads": 16,
        "microseconds": {"short": 17.0, "long": 38.0},
    } in record["points"]
    tuned = path.parent / "tuned" / "two.dispatch.json"
    (table,) = load_tables(Source(str(tuned), tuned.read_text(encoding="utf-8")))
    for point in record["points"]:
        taken = choice(table.rows, point["M"], point["N"], point["B"] * point["heads"])["schedule"]
        assert point["microseconds"][taken] == min(point["microseconds"].values())
    assert not (path.parent / "tuned" / "two.json").exists()


@pytest.mark.usefixtures("clock")
def test_points_are_of_one_attention(folder: Path, run: Run) -> None:
    done = run("tune", "specs/tiny.attn", "--points", "points.json")
    assert done.code == 2
    assert "here are 0" in done.err
    assert not (folder / "points.json").exists()


@pytest.mark.usefixtures("clock")
def test_points_replace_no_file_unasked(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path, points = spec(folder / "specs" / "two.attn"), folder / "points.json"
    command = ("tune", "specs/two.attn", "--points", "points.json", "--rounds", "3")
    points.write_text("mine", encoding="utf-8")
    done = run(*command)
    assert done.code == 2
    assert "error: 'points.json' is there already" in done.err
    assert points.read_text(encoding="utf-8") == "mine"
    assert not (path.parent / "tuned").exists()  # nothing was measured
    assert run(*command, "--force").code == 0
    assert json.loads(points.read_text(encoding="utf-8"))["device"] == "a GPU"
