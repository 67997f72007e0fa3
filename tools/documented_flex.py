"""Parts of the documentation about speed beside FlexAttention: of docs/figures/flex_h200.json, which
`attnc bench --flex` wrote.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from math import ceil, floor
from typing import Any

from attnc.bench.flex_programs import OURS, TORCH, TRITON
from tools.documentation import ROOT, table

#: What targets are called in tables.
_NAMES = {"cuda.sm_90a": "`sm_90a`", "triton": "Triton"}


@cache
def results() -> Mapping[str, Any]:
    """The record of each program."""
    record = json.loads((ROOT / "docs" / "figures" / "flex_h200.json").read_text(encoding="utf-8"))
    return {result["name"]: result for result in record["results"]}


def speeds() -> str:
    """Milliseconds of all programs: with what a call picks, with Triton's kernels, and by torch."""
    beside = ("Triton", "Flex", "to Flex")
    rows: list[tuple[str, ...]] = [("", "kernels", "forward", *beside, "with gradients", *beside)]
    rows.append(("---",) * len(rows[0]))
    for name, result in results().items():
        rows.append((name, _NAMES[result["target"]], *_beside(result["forward"]), *_beside(result["both"])))
    return table(rows)


def _beside(timed: Mapping[str, Any]) -> Iterator[str]:
    for whose in (OURS, TRITON, TORCH):
        found = timed.get(whose, timed[OURS] if whose == TRITON else None)
        yield f"{found['median']:.3f}" if found else "n/a"
    yield ratio(timed)


def waits() -> str:
    """What programs wait for: the host, and first results."""
    rows: list[tuple[str, ...]] = [("", "host, us", "Flex", "first, s", "Flex", "next, s", "Flex")]
    rows.append(("---",) * len(rows[0]))
    for name, result in results().items():
        host = [f"{result['host'][who]:.0f}" for who in (OURS, TORCH)]
        first = [result["first"][who] for who in (OURS, TORCH)] if result["first"] else []
        shown = [*(f"{s[0]:.1f}" for s in first), *(f"{s[1]:.2f}" for s in first)]
        rows.append((name, *host, *(shown or [""] * 4)))
    return table(rows)


def ratio(timed: Mapping[str, Any]) -> str:
    """How many times as fast as FlexAttention, rounded down."""
    if TORCH not in timed:
        return ""
    return f"{floor(100 * timed[TORCH]['median'] / timed[OURS]['median']) / 100:.2f}x"


def changed_import() -> str:
    """What the README says of a program that changes its import."""
    forward, both = (
        sorted(ratio(result[what]) for result in results().values() if ratio(result[what]))
        for what in ("forward", "both")
    )
    first = [
        [result["first"][who][0] for result in results().values() if result["first"]] for who in (OURS, TORCH)
    ]
    ours, theirs = ceil(max(first[0])), floor(min(first[1]))
    text = (
        f"**From FlexAttention**, change an import: {forward[0]} to {forward[-1]} as fast on an H200,"
        f" {both[0]} to {both[-1]} with gradients, a first result after less than {ours} seconds in place"
        f" of more than {theirs}, no block mask to build, nothing compiled again when lengths or data change,"
        " gradients of learned biases included, one operator to `torch.compile`"
        " ([what mods may say](docs/flex.md)):"
    )
    return textwrap.fill(text, width=128) + "\n"


def row(name: str) -> str:
    """A program's forward, for the gallery."""
    result = results()[name]
    return f"| {' | '.join((_NAMES[result['target']], *_beside(result['forward'])))} |\n"
