"""`attnc fmt`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from attnc.cli.compile import SPECS
from attnc.cli.console import complain, find_specs, note, say, say_exactly, show_diagnostics
from attnc.diagnostics import DiagnosticError
from attnc.files import SavedMeanwhile, write_text
from attnc.source import STDIN, Source

#: Pairs of lines up to which a diff is found line by line.
_COMPARABLE = 2_000_000


def fmt(
    specs: SPECS = None,
    is_check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a file would change.")
    ] = False,
    is_diff: Annotated[
        bool, typer.Option("--diff", help="Print the changes instead of making them.")
    ] = False,
) -> None:
    """Format specs in place, keeping comments and meaning. `-` formats standard input to standard output.

    Example: attnc fmt --diff specs/causal_gqa.attn
    """
    paths = find_specs(specs or [], reads_stdin=True)
    if paths == (STDIN,) and not (is_check or is_diff):
        _, _, new = _format_file(STDIN)
        say_exactly(new)
        return
    changed = failed = left = 0
    for path in paths:
        try:
            written, old, new = _format_file(path)
        except DiagnosticError as failure:
            show_diagnostics(failure.diagnostics)
            failed += 1
            continue
        if old == new:
            continue
        if is_diff:
            _show_diff(_name(path), old, new)
        elif is_check:
            say(f"would format {_name(path)}")
        elif not _replace(path, written, new):
            left += 1
            continue
        changed += 1
    verb = "to format" if is_check or is_diff else "formatted"
    counts = {f"{changed} {verb}": True, f"{failed} with errors": failed, f"{left} left as they are": left}
    note(", ".join([f"{len(paths)} checked", *(text for text, is_said in counts.items() if is_said)]))
    if left:
        raise typer.Exit(2)
    if failed or (changed and (is_check or is_diff)):
        raise typer.Exit(1)


def _name(path: Path) -> str:
    return "<stdin>" if path == STDIN else str(path)


def _format_file(path: Path) -> tuple[bytes, str, str]:
    from attnc.syntax.format import format_file
    from attnc.syntax.parser import load, parse

    written = path.read_bytes() if path.is_file() else b""
    source: Source = load(path)
    return written, source.text, format_file(parse(source))


def _replace(path: Path, written: bytes, new: str) -> bool:
    if not path.is_file():
        complain(f"'{path}' is no file that can be written again", "--diff prints the changes")
        return False
    try:
        write_text(path, new, instead_of=written)
    except SavedMeanwhile as failure:
        complain(str(failure), "format it again")
        return False
    except PermissionError:
        complain(f"'{path}' is read-only, or in a folder that is", "--diff prints the changes")
        return False
    say(f"formatted {path}")
    return True


def _show_diff(path: str, old: str, new: str) -> None:
    before, after = (re.split(r"\r?\n", text) for text in (old, new))
    if before == after:
        say(f"{path}: only the ends of its lines change")
    for line in _diff(before, after, path):
        say(line)


def _diff(before: list[str], after: list[str], path: str) -> Iterator[str]:
    """Yields a unified diff. Where much has changed everything has: comparing takes the product of the
    lengths.
    """
    if len(before) * len(after) <= _COMPARABLE:
        yield from difflib.unified_diff(before, after, path, f"{path} (formatted)", lineterm="")
        return
    yield from (f"--- {path}", f"+++ {path} (formatted)", f"@@ -1,{len(before)} +1,{len(after)} @@")
    yield from (f"{sign}{line}" for sign, lines in (("-", before), ("+", after)) for line in lines)
