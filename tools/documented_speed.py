"""The section of the README about speed, of records in docs/figures."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from math import floor
from typing import Any

from tools.documentation import ROOT, table

#: Names of peers.
_PEERS = {
    "fa4": "FlashAttention-4",
    "fa3": "FlashAttention-3",
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
}


def hopper() -> str:
    """TFLOP/s of Hopper's kernels beside the best peers, and what the whole grid says."""
    cells, backward = _cells("forward_hopper_h200"), _cells("backward_hopper_h200")
    peers = _measured(cells)
    titles = ("", "attnc, `cuda.sm_90a`", "attnc, Triton", *(_PEERS[peer] for peer in peers), "to the best")
    rows: list[tuple[str, ...]] = [titles, ("---",) * len(titles)]
    for name in _shown(cells):
        found = cells[name]
        best = min((found[peer]["ms"] for peer in peers if peer in found), default=None)
        ratio = _times(best / found["attnc"]["ms"]) if best else ""
        rows.append((name, *_speeds(found, ("attnc", "triton", *peers)), ratio))
    ahead = (f"{_range(cells, peer)} of {_PEERS[peer]}" for peer in peers)
    behind = (f"{_range(backward, peer)} of {_PEERS[peer]}" for peer in _measured(backward))
    text = (
        "The whole grid is d 64, 128 and 256, n 1k, 4k and 16k, full and causal. On it Hopper's kernels run"
        f" at {', '.join(ahead)}; their gradients at {', '.join(behind)}."
    )
    return f"{table(rows)}\n{_filled(text)}"


def _measured(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The peers of Hopper's kernels that took part."""
    return [peer for peer in ("fa4", "fa3", "cudnn") if any(peer in found for found in cells.values())]


def triton() -> str:
    """Ratios of Triton's kernels, which run on any GPU that Triton knows, to peers of the same run."""
    cells, backward = _cells("forward_h200"), _cells("backward_h200")
    ahead, behind = (
        " and ".join(
            f"{_times(min(_ratios(grid, peer)))} or more of {_PEERS[peer]}" for peer in ("flex", "fa2")
        )
        for grid in (cells, backward)
    )
    masks = [
        found["flex"]["ms"] / found["attnc"]["ms"] for name, found in cells.items() if not _is_of_grid(name)
    ]
    won = sum(ratio > 1 for ratio in _ratios(backward, "cudnn"))
    count = len(list(_ratios(backward, "cudnn")))
    text = (
        f"Over the same grid, in a run of their own, they reach {ahead}, and with masks and scores"
        f" {_times(min(masks))} to {_times(max(masks))} of FlexAttention; their gradients {behind}, ahead of"
        f" cuDNN in {won} of {count} cells."
    )
    return _filled(text)


def _cells(figure: str) -> Mapping[str, Any]:
    """Results by peer of each cell of a record."""
    record = json.loads((ROOT / "docs" / "figures" / f"{figure}.json").read_text(encoding="utf-8"))
    return {cell["name"]: cell["results"] for cell in record["cells"]}


def _shown(cells: Mapping[str, Any]) -> list[str]:
    """Of the grid the middle length, and the masks."""
    return [name for name in cells if " n4096 " in name or not _is_of_grid(name)]


def _is_of_grid(name: str) -> bool:
    return re.search(r" (full|causal)$", name) is not None


def _speeds(found: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    return (f"{found[name]['tflops']:.0f}" if name in found else "n/a" for name in names)


def _ratios(cells: Mapping[str, Any], peer: str) -> Iterator[float]:
    """How many times as fast as a peer, in the cells of the grid."""
    for name, found in cells.items():
        if _is_of_grid(name) and peer in found:
            yield found[peer]["ms"] / found["attnc"]["ms"]


def _range(cells: Mapping[str, Any], peer: str) -> str:
    ratios = list(_ratios(cells, peer))
    return f"{_times(min(ratios))} to {_times(max(ratios))} the speed"


def _times(ratio: float) -> str:
    """Rounded down."""
    return f"{floor(100 * ratio) / 100:.2f}x"


def _filled(text: str) -> str:
    return textwrap.fill(text, width=128) + "\n"
