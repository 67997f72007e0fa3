"""`attnc verify --invariant`: whether rows keep their bits under `order = absolute(...)`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnc.cli.console import Mistake, count_noun, loading, paint, say, say_json
from attnc.cli.judge import choose_judges

if TYPE_CHECKING:
    from attnc.plan import ir

#: Corpora of each group of modules, with a GPU and without.
_CORPORA, _CORPORA_WITHOUT_GPU = 2, 1
#: Rows with other bits that are printed.
_SHOWN = 5


def verify_invariant(
    paths: Sequence[Path], attention: str | None, variant: str | None, target: str | None, *, as_json: bool
) -> None:
    """Runs calls of all schedules and compares bits. Exit(1) where a row has others. Raises Mistake where no
    attention has an order, and where a corpus of it cannot be made.
    """
    with loading():
        from attnc.plan import ir
        from attnc.verify.invariant import list_groups
    judges = choose_judges(paths, attention, variant, target)
    groups = list_groups([judge.module for judge in judges if isinstance(judge.module, ir.Module)])
    if not groups:
        hint = "write 'order = absolute(2048)' in the attention"
        raise Mistake("no attention of these promises that rows keep their bits", hint)
    rows = [_verify_group(group, quiet=as_json) for group in groups]
    if as_json:
        say_json(rows)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _verify_group(group: Sequence[ir.Module], *, quiet: bool) -> dict[str, Any]:
    from attnc.verify.invariant import compare
    from attnc.verify.subject import place, subject_of

    subjects = [subject_of(module) for module in group]
    corpora = _CORPORA_WITHOUT_GPU if subjects[0].device == "cpu" else _CORPORA
    name, labels = group[0].variant.attention.name, [module.variant.name for module in group]
    try:
        found = compare(subjects, range(corpora))
    except ValueError as failure:
        raise Mistake(f"'{name}' cannot be compared: {failure}") from None
    if not quiet:
        state = paint("WRONG", "1;31") if found.broken else paint("ok   ", "32")
        what = f"{count_noun(found.calls, 'call')}, {found.rows} rows"
        end = "rows have other bits" if found.broken else "the same bits"
        say(
            state,
            f" {name} for {group[0].target}, {', '.join(labels)}: {what} on {place(subjects[0])}; {end}",
        )
        for line in found.broken[:_SHOWN]:
            say(f"      {line}")
    return {
        "attention": name,
        "target": group[0].target,
        "variants": labels,
        "ok": not found.broken,
        "calls": found.calls,
        "rows": found.rows,
        "broken": found.broken,
    }
