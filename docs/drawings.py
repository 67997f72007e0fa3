"""Pictures of the site: tiles of masks as SVG and bars of speeds, drawn from the text that pages hold.

Colours are classes of `_static/site.css`, which has them for light and for dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

#: How a tile is shown in text -> its class and what it stands for.
TILES = {
    "·": ("skipped", "skipped"),
    "▒": ("partial", "partial: mask code runs"),
    "█": ("full", "full: no mask code"),
}
_ROW = re.compile(r"[·▒█]+")


def tile_pictures(text: str) -> list[tuple[str, list[str], str]] | None:
    """Returns (title, rows, caption) of each picture of tiles in a text block; None for any other text.

    Pictures stand beside each other, two spaces or more apart. One line above them may hold titles and one
    line below them captions.
    """
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.strip("\n").split("\n")]
    are_rows = [all(_ROW.fullmatch(part) for part in parts) for parts in lines]
    rows = [parts for parts, is_row in zip(lines, are_rows, strict=True) if is_row]
    above = [] if are_rows[0] else lines[0]
    below = [] if are_rows[-1] else lines[-1]
    if not rows or len(rows) + bool(above) + bool(below) != len(lines):
        return None
    count = len(rows[0])
    titles, captions = above or [""] * count, below or [""] * count
    if {len(titles), len(captions), *map(len, rows)} != {count}:
        return None
    if any(len({len(parts[i]) for parts in rows}) > 1 for i in range(count)):
        return None
    return [(titles[i], [parts[i] for parts in rows], captions[i]) for i in range(count)]


def draw_tiles(title: str, rows: Sequence[str], caption: str) -> str:
    """Draws tiles as a figure, queries from top to bottom. A tile is twice as high as wide, like 128 x 64."""
    width, height = len(rows[0]), 2 * len(rows)
    parts = []
    for y, row in enumerate(rows):
        x = 0
        for tile, run in groupby(row):
            count = len(list(run))
            parts.append(
                f'<rect class="tile-{TILES[tile][0]}" x="{x}" y="{2 * y}" width="{count}" height="2"/>'
            )
            x += count
    label = escape(title or "Tiles of a mask: skipped, partial and full")
    grid = "".join(f'<path d="M0 {2 * y}H{width}"/>' for y in range(1, len(rows)))
    grid += "".join(f'<path d="M{x} 0V{height}"/>' for x in range(1, width))
    head = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    foot = f'<figcaption class="quiet">{escape(caption)}</figcaption>' if caption else ""
    return (
        f'<figure class="tiles">{head}<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'{"".join(parts)}<g class="tile-grid">{grid}</g></svg>{foot}</figure>'
    )


def draw_legend() -> str:
    """Names the three tones."""
    items = (f'<li><i class="tile-{name}"></i>{told}</li>' for name, told in TILES.values())
    return f'<ul class="tile-legend">{"".join(items)}</ul>'


def draw_bars(groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Draws a group of horizontal bars for each row: {row: {series: value}}. The first series stands out.

    Bars are boxes of HTML, not SVG: on a phone their text keeps its size.
    """
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    most = max(value for values in groups.values() for value in values.values())
    rows = []
    for group, values in groups.items():
        bars = "".join(
            f'<li title="{escape(name)}: {value:g} {escape(unit)}"><i class="series-{series.index(name)}" '
            f'style="--length: {max(0.002, value / most):.4g}"></i>{value:g}</li>'
            for name, value in values.items()
        )
        rows.append(f"<dt>{escape(group)}</dt><dd><ul>{bars}</ul></dd>")
    legend = "".join(f'<li><i class="series-{i}"></i>{escape(name)}</li>' for i, name in enumerate(series))
    return (
        f'<figure class="bars"><figcaption>{escape(unit)}</figcaption><ul class="bar-legend">{legend}</ul>'
        f"<dl>{''.join(rows)}</dl></figure>"
    )


def read_table(lines: Sequence[str]) -> list[list[str]]:
    """Returns the cells of a table of Markdown, its head first."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def pick_bars(
    table: Sequence[Sequence[str]], columns: Mapping[int, str], most: int = 12
) -> dict[str, dict[str, float]]:
    """Returns {row: {series: value}} of a table's columns, by their positions, for `draw_bars`.

    Of a table with more than `most` rows it takes those at 4096 and those whose length is not one of several.
    """
    rows = [row for row in table[1:] if all(at < len(row) for at in columns)]
    if len(rows) > most:
        rows = [row for row in rows if "n4096" in row[0] or row[0].split()[-1] not in ("full", "causal")]
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        values = {}
        for at, name in columns.items():
            try:
                values[name] = float(row[at])
            except ValueError:
                continue
        if len(values) > 1:
            groups[row[0].strip("`")] = values
    return groups
