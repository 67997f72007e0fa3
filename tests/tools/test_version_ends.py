"""The ends of the ranges of versions, as pyproject.toml states them."""

from pathlib import Path

from tools.version_ends import TESTED, find_ranges, requirements_of

ROOT = Path(__file__).parents[2]


def test_every_tested_package_has_a_range_in_pyproject() -> None:
    ranges = find_ranges((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tuple(ranges) == TESTED


def test_ends_are_the_lowest_version_and_the_newest_allowed() -> None:
    ranges = {"torch": ("2.6", ">=2.6"), "triton": ("3.6", ">=3.6,<3.10"), "cupy-cuda13x": ("13.6", ">=13.6")}
    assert requirements_of("old", ranges) == ["torch==2.6", "triton==3.6", "cupy-cuda13x==13.6"]
    assert requirements_of("new", ranges) == ["torch>=2.6", "triton>=3.6,<3.10", "cupy-cuda13x>=13.6"]
