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


def campaigns() -> str:
    """Returns a table of both campaigns by target and phase or package, and where they ran."""
    rows: list[tuple[str, ...]] = [("", "mutants", *COLUMNS, "seen"), ("---",) * (len(COLUMNS) + 3)]
    for name, campaign in scores().items():
        operators = set(campaign["operators"])
        for group, counts in campaign["groups"].items():
            if group not in operators:
                score = score_of(counts)
                numbers = (str(counts[kind]) for kind in COLUMNS)
                seen = "" if score is None else f"{100 * score:.1f} %"
                title = f"{name}, all" if group == "all" else group.removeprefix("python ")
                rows.append((title, str(sum(counts.values())), *numbers, seen))
    said = (f"{name}: seed {campaign['seed']}, {campaign['where']}" for name, campaign in scores().items())
    return f"{table(rows)}\n{'; '.join(said)}.\n"
