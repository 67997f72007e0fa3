"""Figures of benchmarks: groups of horizontal bars, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any | None:
    """matplotlib's pyplot, drawing to files; None where matplotlib is missing."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None
    return plt


def grouped_bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """A group of bars for each name, from the top, a bar of each series in it."""
    height = 0.8 / len(series)
    for i, (title, values) in enumerate(series.items()):
        axes.barh([row + i * height for row in range(len(groups))], values, height, label=title)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(groups))], groups)
    if not axes.yaxis_inverted():  # panels may share the axis
        axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
