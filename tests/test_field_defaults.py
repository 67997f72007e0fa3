"""What a record does not say is not there: a default is nothing, but for those that are listed here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

import pytest

from attnc.verify.interpreter import ensure_interpreter

PACKAGES = ("expr", "plan", "support")
#: Numbers and answers that are meant where nothing is said, by class and field.
MEANT: dict[str, dict[str, Any]] = {
    "expr": {
        "RealFunction.high": inf,
        "RealFunction.is_monotonous": True,
        "RealFunction.low": -inf,
        "Solution.exact": True,
    },
    "plan": {
        "CudaBackwardLayout.reads_rows": True,
        "Device.exp2_per_clock": 16,
        "ErrorBound.addition_error": 1.5 * 2.0**-24,
        "ErrorBound.columns_factor": 1.0,
        "ErrorBound.exp_ulps": 2.0,
        "ErrorBound.least_probability": 1.0,
        "ErrorBound.most_probability": 1.0,
        "ErrorBound.splits": 1,
        "Section.least": 1,
        "LastSection.before": 1,
        "ListMaking.queries": 1,
        "ListWalk.queries": 1,
        "Shift.least_probability": 1.0,
        "Shift.most_probability": 1.0,
        "Split.block_share": 1.0,
        "TileShape.is_one_segment": True,
    },
    "support": {
        "Box.step": 1,
        "CudaAttention.chunk": 8,
        "Kernel.contracts": True,
        "Split.block_share": 1.0,
        "Split.counted": 128,
        "Split.idle_gain": 1.3,
        "Split.trips": 3,
        "TmaKernels.counts": True,
    },
}


def _records(package: str) -> Iterator[type]:
    folder = Path(__file__).parents[1] / "attnc" / package
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parents[1]).with_suffix("").parts
        if path.name == "__init__.py":
            continue
        module = import_module(".".join(parts))
        for made in vars(module).values():
            if isinstance(made, type) and made.__module__ == module.__name__:
                yield made


def _defaults(made: type) -> dict[str, Any]:
    """Returns the defaults of a record's own fields."""
    if dataclasses.is_dataclass(made):
        names = inspect.get_annotations(made)
        own = [field for field in dataclasses.fields(made) if field.name in names]
        return {field.name: field.default for field in own if field.default is not dataclasses.MISSING}
    found: dict[str, Any] = getattr(made, "_field_defaults", {})
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_default_is_nothing_or_is_meant(package: str) -> None:
    ensure_interpreter()
    found = {
        f"{made.__name__}.{name}": value
        for made in _records(package)
        for name, value in _defaults(made).items()
        if isinstance(value, bool | int | float) and value
    }
    assert found == MEANT[package]
