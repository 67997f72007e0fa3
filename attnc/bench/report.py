"""What benchmarks write: tables in Markdown, data in JSON, and bars where matplotlib is installed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import torch

import attnc
from attnc.files import strict_json
from attnc.output import write_beside
from attnc.runtime.timing import Timing

#: What tables of TFLOP/s say of their figures.
IN_TFLOPS = "Medians of interleaved rounds in TFLOP/s; spread is the width of the middle 80 % of the samples."
#: Draws a figure with matplotlib's pyplot.
Draw: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The results of a run. draw: None where there is nothing to show."""

    markdown: str
    data: Mapping[str, Any]
    draw: Draw | None = None

    def write(self, folder: Path, stem: str, *, force: bool = False) -> tuple[Path, ...]:
        """Writes STEM.md, STEM.json and, where matplotlib is installed, STEM.png; returns their paths. Raises
        NotOurs where one is there that no report was written to, unless `force`.
        """
        table, data, plot = names(stem)
        files = {table: self.markdown.encode(), data: (strict_json(self.data) + "\n").encode()}
        if self.draw is not None and (drawn := draw_plot(self.draw)) is not None:
            files[plot] = drawn
        write_beside(files, folder, force=force)
        return tuple(folder / name for name in files)


def names(stem: str) -> tuple[str, str, str]:
    """Returns what the files of a report are called."""
    return f"{stem}.md", f"{stem}.json", f"{stem}.png"


def machine(target: str) -> dict[str, str]:
    """Returns what the figures depend on, and whose kernels were timed."""
    import triton

    cudnn: Any = torch.backends.cudnn  # torch ships it without annotations
    return {
        "device": torch.cuda.get_device_name(),
        "attnc": attnc.__version__,
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "cudnn": str(cudnn.version()),
        "python": platform.python_version(),
        "target": target,
    }


def ran_on(machine: Mapping[str, str]) -> str:
    """Says what the figures depend on, in a sentence."""
    software = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "device")
    return f"{machine['device']}; {software}."


def document(*blocks: Iterable[str]) -> str:
    """Returns blocks of lines, an empty line between them; those without lines are left out."""
    return "\n\n".join(text for block in blocks if (text := "\n".join(block))) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return [next(lines), f"|{'---|' * len(head)}", *lines]


def gaps(reasons: Iterable[str]) -> list[str]:
    """Returns why figures are missing, each reason once."""
    return [f"* n/a for {reason}" for reason in sorted(set(reasons))]


def figure(value: float | None, form: str = ".0f", unit: str = "") -> str:
    return "n/a" if value is None else f"{value:{form}}{unit}"


def spread(timing: Timing | None) -> str:
    """Returns the width of the middle 80 % of the samples."""
    return figure(100 * timing.spread if timing else None, ".1f", " %")


def ratio(timing: Timing | None, other: Timing | None, form: str = ".2f", unit: str = "x") -> str:
    return figure(other.median / timing.median if timing and other else None, form, unit)


def fastest(timings: Mapping[str, Timing], names: Iterable[str]) -> str | None:
    return min(
        (name for name in names if name in timings), key=lambda name: timings[name].median, default=None
    )


def to_the_best(timings: Mapping[str, Timing], ours: str, others: Iterable[str]) -> str:
    """Returns how many times as fast as the best of the others ours is, and who that is."""
    best = fastest(timings, others)
    if best is None or ours not in timings:
        return "n/a"
    return f"{ratio(timings[ours], timings[best])} {best}"


def draw_plot(draw: Draw) -> bytes | None:
    """Returns the figure as PNG, or None where matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None
    figure, drawn = draw(plt), BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    plt.close(figure)
    return drawn.getvalue()


def grouped_bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draws a group of bars for each name, from the top, a bar of each series in it."""
    height = 0.8 / len(series)
    for i, (title, values) in enumerate(series.items()):
        axes.barh([row + i * height for row in range(len(groups))], values, height, label=title)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(groups))], groups)
    if not axes.yaxis_inverted():  # panels may share the axis
        axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
