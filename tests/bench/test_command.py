"""What `attnc bench` does with any benchmark: warm up, measure, print, write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from attnc.bench import report, run
from attnc.bench.report import Page
from attnc.bench.run import Benchmark, Job, Report
from attnc.cli import bench
from attnc.cli.console import Mistake


@dataclass(frozen=True)
class Cell:
    name: str


class Lengths(Benchmark[Cell, Mapping[str, int]]):
    """The lengths of names."""

    stem: ClassVar[str] = "lengths"

    @property
    def cells(self) -> Sequence[Cell]:
        return [Cell("one"), Cell("three"), Cell("thirteen")]

    def describe(self, cell: Cell) -> str:
        return f"the name {cell.name}"

    def jobs(self, cells: Sequence[Cell]) -> Sequence[Job]:
        return [lambda: None for _ in cells]

    def measure(self, cells: Sequence[Cell], rounds: int, report: Report) -> Mapping[str, int]:
        for cell in cells:
            report(cell.name)
        return {cell.name: rounds * len(cell.name) for cell in cells}

    def page(self, results: Mapping[str, int], machine: Mapping[str, str]) -> Page:
        return Page(markdown=f"{machine['target']}: {dict(results)}\n", data=results)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    warmed: list[int] = []
    monkeypatch.setattr(bench, "need_gpu", lambda: None)
    monkeypatch.setattr(report, "machine", lambda target: {"target": target})
    monkeypatch.setattr(run, "warm_up", lambda jobs: warmed.append(len(jobs)))
    return warmed


def test_a_run_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: list[int]
) -> None:
    chosen = bench._matching(Lengths().cells, "t, four")
    assert [cell.name for cell in chosen] == ["three", "thirteen"]
    bench._run(Lengths(), chosen, 2, tmp_path / "new", "triton")
    printed = capsys.readouterr()
    assert no_gpu == [2]
    assert printed.out == "triton: {'three': 10, 'thirteen': 16}\n"
    assert printed.err.splitlines()[0] == "compiling for 2 cells"
    assert [Path(line.split()[-1]).name for line in printed.err.splitlines()[1:]] == [
        "lengths.md",
        "lengths.json",
    ]
    written: dict[str, Any] = json.loads((tmp_path / "new" / "lengths.json").read_text(encoding="utf-8"))
    assert written == {"three": 10, "thirteen": 16}


def test_reports_replace_reports_alone(tmp_path: Path, no_gpu: list[int]) -> None:
    """A file of that name that is somebody's, or was edited, is found before anything is measured."""
    table, picture = tmp_path / "lengths.md", tmp_path / "lengths.png"

    def measure(**options: bool) -> None:
        bench._run(Lengths(), [Cell("one")], 3, tmp_path, "triton", **options)

    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    for _ in range(2):
        measure()
    for place in (table, picture):
        place.write_text("mine", encoding="utf-8")
        with pytest.raises(Mistake, match=f"1 file in '{tmp_path}' would be lost"):
            measure()
        assert place.read_text(encoding="utf-8") == "mine"
        assert len(no_gpu) == 2
        measure(force=True)
        no_gpu.pop()
        picture.unlink(missing_ok=True)
    assert table.read_text(encoding="utf-8") == "triton: {'one': 9}\n"
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "mine"


def test_a_pattern_that_no_name_holds_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="no cell's name holds 'seven'"):
        bench._matching(Lengths().cells, "seven")


def test_every_mode_lists_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    from attnc.bench.attention import AttentionBenchmark
    from attnc.bench.cells import quick
    from attnc.bench.decode import DecodeBenchmark
    from attnc.bench.flex import FlexBenchmark
    from attnc.bench.prefill import PrefillBenchmark
    from tools.bench.papers import PapersBenchmark
    from tools.bench.ranks import RanksBenchmark

    benchmarks: list[Benchmark[Any, Any]] = [
        AttentionBenchmark(offered=quick(), peers=()),
        DecodeBenchmark(peers=()),
        PrefillBenchmark(peers=()),
        FlexBenchmark(),
        PapersBenchmark(),
        RanksBenchmark(ranks=2, seconds=60, out=Path()),
    ]
    assert len({made.stem for made in benchmarks}) == len(benchmarks)
    for made in benchmarks:
        names = [cell.name for cell in made.cells]
        assert len(set(names)) == len(names)
        assert all(made.describe(cell).startswith(cell.name) for cell in made.cells)
