"""Parts of the documentation about mutants: of tools/mutants/scores.json, which campaigns wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from tools.documentation import table
from tools.mutants.scores import COLUMNS, SCORES, score_of


@cache
def scores() -> Mapping[str, Any]:
    """Returns the campaigns that are committed, by name."""
    found: Mapping[str, Any] = json.loads(SCORES.read_text(encoding="utf-8"))
    return found


#: The campaigns whose scores are shown by operator too: the largest of kernels, and that of Python.
_BY_OPERATOR = ("kernels on a GPU", "python")


def campaigns() -> str:
    """Returns a table of the campaigns by target and phase or package, and where they ran; then those of some
    by operator.
    """
    rows, by_operator = list[tuple[str, ...]](), dict[str, list[tuple[str, ...]]]()
    for name, campaign in scores().items():
        for group, counts in campaign["groups"].items():
            title = f"{name}, all" if group == "all" else group.removeprefix("python ")
            if group not in campaign["operators"]:
                rows.append(_row(title, counts))
            elif name in _BY_OPERATOR:
                by_operator.setdefault(name, []).append(_row(title, counts))
    said = (f"{name}: seed {campaign['seed']}, {campaign['where']}" for name, campaign in scores().items())
    shown = (
        f"By what was changed, {name}:\n\n{table([*_head(), *own])}" for name, own in by_operator.items()
    )
    return "\n".join((f"{table([*_head(), *rows])}\n{'; '.join(said)}.\n", *shown))


def _head() -> list[tuple[str, ...]]:
    return [("", "mutants", *COLUMNS, "seen"), ("---",) * (len(COLUMNS) + 3)]


def _row(title: str, counts: Mapping[str, int]) -> tuple[str, ...]:
    score = score_of(counts)
    seen = "" if score is None else f"{100 * score:.1f} %"
    return title, str(sum(counts.values())), *(str(counts[kind]) for kind in COLUMNS), seen
