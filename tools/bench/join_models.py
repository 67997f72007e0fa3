"""Joins runs of `attnc bench --models` in which other libraries took part into one file.

    python -m tools.bench.join_models RUN [RUN ...] --out docs/figures/models_h200.json

A cell is that of the first run that has it. Who took part in a later run alone is added by its ratio to a
candidate of both, cuDNN where it is one, else attnc: clocks differ from run to run, ratios hardly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from attnc.bench.model_cells import model_cells

Run: TypeAlias = Mapping[str, Any]
#: Whom ratios are to, the first that took part in both runs.
_THROUGH = ("cudnn", "attnc")


def join_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the runs as one, cells in the order of the benchmark, those of gradients last, others as they
    come. What is joined says through whom, and on which device it ran.
    """
    cells: dict[str, dict[str, Any]] = {}
    for run in runs:
        for cell in run["cells"]:
            known = cells.get(cell["name"])
            cells[cell["name"]] = dict(cell) if known is None else _join_cell(known, cell, run["machine"])
    first, *_ = runs
    peers = dict.fromkeys(name for run in runs for name in run["peers"])
    known_cells = sorted(model_cells(), key=lambda cell: cell.job == "training")
    order = [cell.name for cell in known_cells if cell.name in cells]
    names = dict.fromkeys((*order, *cells))
    return {**first, "peers": list(peers), "cells": [cells[name] for name in names]}


def _join_cell(known: dict[str, Any], cell: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
    results, others = dict(known["results"]), cell["results"]
    through = next((name for name in _THROUGH if name in results and name in others), None)
    if through is None:
        return known
    work = results[through]["ms"] * results[through].get("tflops", results[through].get("gbs"))
    for name, found in others.items():
        if name not in results:
            results[name] = _scaled(found, results[through], others[through], work)
            results[name]["joined"] = {"through": through, "device": machine.get("device")}
    missing = {name: why for name, why in known["missing"].items() if name not in results}
    return {**known, "results": results, "took_part": list(results), "missing": missing}


def _scaled(
    found: Mapping[str, Any], here: Mapping[str, Any], there: Mapping[str, Any], work: float
) -> dict[str, Any]:
    unit = "tflops" if "tflops" in found else "gbs"
    scaled = _times(found, here["ms"] / there["ms"])
    made: dict[str, Any] = {**scaled, unit: round(work / scaled["ms"], 1)}
    if "flushed" in found:
        made["flushed"] = _times(found["flushed"], here["flushed"]["ms"] / there["flushed"]["ms"])
    return made


def _times(figures: Mapping[str, Any], factor: float) -> dict[str, float]:
    return {name: round(figures[name] * factor, 5) for name in ("ms", "low", "high")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    joined = join_runs([json.loads(path.read_text(encoding="utf-8")) for path in given.runs])
    given.out.write_text(json.dumps(joined, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
