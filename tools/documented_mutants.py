"""Parts of the documentation about mutants: of tools/mutants/scores.json, which campaigns wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from tools.documentation import table
from tools.mutants.scores import COLUMNS, SCORES, score_of


@cache
def scores() -> Mapping[str, Any]:
    """Returns the campaigns that are committed, by name."""
    found: Mapping[str, Any] = json.loads(SCORES.read_text(encoding="utf-8"))
    return found


#: What the names of campaigns of kernels on a GPU begin with: their seeds are shown together.
_SEEDS = "kernels on a GPU"


def campaigns() -> str:
    """Returns a table of the campaigns by target and phase or package, and where they ran; then, of kernels
    on a GPU and of Python, by operator.
    """
    shown = {_SEEDS: _add(name for name in scores() if name.startswith(_SEEDS)), **_others()}
    operators = {name for campaign in scores().values() for name in campaign["operators"]}
    rows = list[tuple[str, ...]]()
    for name, groups in shown.items():
        titles = {
            group: f"{name}, all" if group == "all" else group.removeprefix("python ") for group in groups
        }
        rows += [_row(titles[group], groups[group]) for group in groups if group not in operators]
        if name == _SEEDS:
            seeds = (campaign for title, campaign in scores().items() if title.startswith(_SEEDS))
            rows += [_row(f"seed {one['seed']} alone", one["groups"]["all"]) for one in seeds]
    runs = [
        f"- {name[0].upper()}{name[1:]}: seed {run['seed']}, {run['where']}."
        for name, run in scores().items()
    ]
    tables = [f"{table([*_head(), *rows])}\n" + "\n".join(runs) + "\n"]
    for name in (_SEEDS, "python"):
        own = [_row(group, counts) for group, counts in shown[name].items() if group in operators]
        tables.append(f"By what was changed, {name}:\n\n{table([*_head(), *own])}")
    return "\n".join(tables)


def _others() -> dict[str, Mapping[str, Counter[str]]]:
    return {name: _add([name]) for name in scores() if not name.startswith(_SEEDS)}


def _add(names: Iterable[str]) -> Mapping[str, Counter[str]]:
    """Adds up the counts of campaigns, by group."""
    found: dict[str, Counter[str]] = {}
    for name in names:
        for group, counts in scores()[name]["groups"].items():
            found.setdefault(group, Counter()).update(counts)
    return found


def _head() -> list[tuple[str, ...]]:
    return [("", "mutants", *COLUMNS, "seen"), ("---",) * (len(COLUMNS) + 3)]


def _row(title: str, counts: Mapping[str, int]) -> tuple[str, ...]:
    score = score_of(counts)
    seen = "" if score is None else f"{100 * score:.1f} %"
    return title, str(sum(counts.values())), *(str(counts[kind]) for kind in COLUMNS), seen
