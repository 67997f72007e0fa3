"""What a change of a spec does to its modules: `attnc compile --diff`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnc.cli.console import counted, note, paint, say
from attnc.output import Drift, Output

#: Changes with every byte of a spec, comments too.
_RECORD = re.compile(r"[-+]Spec sha256: [0-9a-f]+$")
_STYLES = {"@": "36", "+": "32", "-": "31"}


def show_differences(drifts: Iterable[Drift], outputs: Iterable[Output], out: Path) -> None:
    """Prints a unified diff for every module that would change, and a line for one that would come or go."""
    drifts = tuple(drifts)
    lengths = {output.path: output.text.count("\n") for output in outputs}
    untouched = 0
    for drift in drifts:
        path = f"{out.as_posix()}/{drift.path}"
        if drift.kind == "missing":
            say(paint("new", "32"), f" {path}, {counted(lengths[drift.path], 'line')}")
        elif drift.kind == "orphan":
            say(paint("removed", "31"), f" {path}")
        elif lines := list(_changes(drift.diff)):
            for line in lines:
                say(paint(line, _STYLES.get(line[0], "1")) if line[0] != " " else line)
        else:
            untouched += 1
    same = f", {untouched} of them in the record of their spec alone" if untouched else ""
    note(f"{counted(len(drifts), 'file')} would change in {out.as_posix()}/{same}")


def _changes(diff: str) -> Iterator[str]:
    """The lines of a unified diff but for hunks that change nothing except the digest of the spec."""
    head, *hunks = re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)
    kept = [hunk for hunk in hunks if not all(map(_RECORD.match, _changed(hunk)))]
    if kept or not hunks:
        for part in (head, *kept):
            yield from part.splitlines()


def _changed(hunk: str) -> list[str]:
    return [line for line in hunk.splitlines() if line.startswith(("+", "-"))]
