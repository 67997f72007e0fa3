"""`attnc verify --carry`: records go to new texts that have the machine code of a git revision."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attnc.cli.console import Mistake, count_noun, note, say

if TYPE_CHECKING:
    from attnc.verify.record import Records


def export_revision(revision: str, folder: Path, path: str) -> Path:
    """Writes a path of a git revision into a folder, and returns where it is there. Raises Mistake where git
    has no such thing.
    """
    command = ["git", "archive", "--format=tar", revision, path]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError:
        raise Mistake("git was not found", "revisions are read by it") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise Mistake(
            f"git has no {path}/ of '{revision}': {said[-1] if said else error}",
            "name a commit whose modules have been recorded, such as HEAD",
        ) from None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / path


def carry(
    revision: str, generated: Path, records: Records, update: Callable[[Callable[[Records], Records]], object]
) -> None:
    """Carries records from a revision's modules to those that are there now. Exit(1) if any stays lapsed.

    generated: the folder of modules, below the current one; update: writes the file of records.
    """
    from attnc.support.cache import own_folder
    from attnc.verify.carry import Comparison, adopt_carried, carry_records

    found: list[Comparison] = []

    def report(comparison: Comparison) -> None:
        found.append(comparison)
        if comparison.because:
            say(f"left     {comparison.module}: {comparison.because}")
        else:
            compiled = f"{count_noun(len(comparison.pairs), 'kernel')} with the machine code of {revision}"
            words = "comments, docstrings, line breaks and annotations alone have changed"
            say(f"carried  {comparison.module}: {compiled if comparison.pairs else words}")

    with tempfile.TemporaryDirectory(dir=own_folder()) as folder:
        before = export_revision(revision, Path(folder), generated.as_posix())
        try:
            carried = carry_records(records, before, generated, report=report)
        except FileNotFoundError as missing:
            raise Mistake(str(missing), "machine code is compared by NVRTC") from None
    left = sum(bool(comparison.because) for comparison in found)
    if len(found) > left:
        update(lambda known: adopt_carried(known, records, carried))
    if left:
        note("'attnc verify --lapsed --record' verifies what is left on a GPU")
    say(f"{len(found) - left} carried, {left} left")
    if left:
        raise typer.Exit(1)
