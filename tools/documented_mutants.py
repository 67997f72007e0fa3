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


#: What the names of campaigns begin with whose seeds are shown together, and what all of a kind are called:
#: kernels on a GPU, and Python by seeds that no test had learnt from.
_SEEDS = {"kernels on a GPU": "kernels on a GPU", "python, seed": "python, seeds from 2060 on"}


def campaigns() -> str:
    """Returns a table of the campaigns by target and phase or package, and where they ran; then, of kernels
    on a GPU and of Python, by operator.
    """
    operators = {name for campaign in scores().values() for name in campaign["operators"]}
    rows, shown = list[tuple[str, ...]](), dict[str, Mapping[str, Counter[str]]]()
    for title, names in _list_shown().items():
        shown[title] = groups = _add(names)
        titles = {
            group: f"{title}, all" if group == "all" else group.removeprefix("python ") for group in groups
        }
        rows += [_row(titles[group], groups[group]) for group in groups if group not in operators]
        if len(names) > 1:
            seeds = (scores()[name] for name in names)
            rows += [_row(f"seed {one['seed']} alone", one["groups"]["all"]) for one in seeds]
    runs = [_describe_run(name, run["seed"], run["where"]) for name, run in scores().items()]
    tables = [f"{table([*_head(), *rows])}\n" + "\n".join(runs) + "\n"]
    for title in _SEEDS.values():
        own = [_row(group, counts) for group, counts in shown[title].items() if group in operators]
        tables.append(f"By what was changed, {title}:\n\n{table([*_head(), *own])}")
    return "\n".join(tables)


def _describe_run(name: str, seed: int, where: str) -> str:
    said = "" if name.endswith(str(seed)) else f"seed {seed}, "
    return f"- {name[0].upper()}{name[1:]}: {said}{where}."


def _list_shown() -> dict[str, list[str]]:
    """Lists titles, and the campaigns whose counts stand below them."""
    found: dict[str, list[str]] = {}
    for name in scores():
        title = next((title for begins, title in _SEEDS.items() if name.startswith(begins)), name)
        found.setdefault(title, []).append(name)
    return found


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
