"""Runs in which other libraries took part, as one."""

from __future__ import annotations

from typing import Any

import pytest

from attnc.bench.model_cells import model_cells
from tools.bench.join_models import join_runs


def cell(
    name: str, unit: str = "tflops", missing: dict[str, str] | None = None, **ms: float
) -> dict[str, Any]:
    results = {
        who: {"ms": x, "low": x, "high": x, unit: 600 / x, "flushed": {"ms": 2 * x, "low": x, "high": x}}
        for who, x in ms.items()
    }
    return {"name": name, "took_part": list(ms), "results": results, "missing": missing or {}}


def run(*cells: dict[str, Any], peers: list[str], device: str = "H200") -> dict[str, Any]:
    return {"format": 1, "machine": {"device": device}, "peers": peers, "cells": list(cells)}


def test_who_took_part_elsewhere_is_joined_by_a_ratio() -> None:
    first = run(
        cell("a", attnc=1.0, cudnn=2.0, missing={"fa4": "not installed"}),
        cell("b", attnc=1.0),
        peers=["cudnn"],
    )
    second = run(
        cell("a", attnc=1.5, cudnn=4.0, fa4=3.0), cell("b", "gbs", attnc=2.0, fa4=3.0), cell("c", fa4=1.0),
        peers=["cudnn", "fa4"], device="another",
    )  # fmt: skip
    joined = join_runs([first, second])
    assert joined["peers"] == ["cudnn", "fa4"]
    assert joined["machine"] == {"device": "H200"}
    by_name = {found["name"]: found for found in joined["cells"]}
    assert list(by_name) == ["a", "b", "c"]
    a = by_name["a"]
    assert a["results"]["attnc"]["ms"] == 1.0
    assert a["took_part"] == ["attnc", "cudnn", "fa4"]
    assert a["missing"] == {}
    assert a["results"]["fa4"] == {
        "ms": 1.5, "low": 1.5, "high": 1.5, "tflops": 400.0, "flushed": {"ms": 3.0, "low": 1.5, "high": 1.5},
        "joined": {"through": "cudnn", "device": "another"},
    }  # fmt: skip
    assert by_name["b"]["results"]["fa4"]["ms"] == 1.5
    assert by_name["b"]["results"]["fa4"]["joined"]["through"] == "attnc"
    assert "joined" not in by_name["c"]["results"]["fa4"]


def test_runs_without_a_candidate_in_common_are_not_joined() -> None:
    joined = join_runs([run(cell("a", sdpa=1.0), peers=["sdpa"]), run(cell("a", fa3=1.0), peers=["fa3"])])
    assert list(joined["cells"][0]["results"]) == ["sdpa"]


@pytest.mark.parametrize("unit", ["tflops", "gbs"])
def test_what_is_joined_has_the_unit_of_its_cell(unit: str) -> None:
    joined = join_runs([
        run(cell("a", unit, attnc=1.0), peers=[]),
        run(cell("a", unit, attnc=1.0, fa3=2.0), peers=["fa3"]),
    ])  # fmt: skip
    assert joined["cells"][0]["results"]["fa3"][unit] == 300.0


def test_cells_have_the_order_of_the_benchmark() -> None:
    first, second, *_ = (cell.name for cell in model_cells() if cell.job != "training")
    trained = next(cell.name for cell in model_cells() if cell.job == "training")
    alone = run(cell(trained, attnc=1.0), cell(second, attnc=1.0), peers=[])
    runs = [alone, run(cell("own", attnc=1.0), cell(first, attnc=1.0), peers=[])]
    assert [cell["name"] for cell in join_runs(runs)["cells"]] == [first, second, trained, "own"]
