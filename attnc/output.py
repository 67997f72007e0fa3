"""The output folder: what is there, compared with what should be, and made so."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: A file below the output folder is ours to replace or remove if this stands in its first lines.
MARK = "attnc compile"
_HEAD = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A file to write: `path` is relative to the output folder, with forward slashes."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A file that is not what the specs say. `diff`: unified, from the file on disk to the right text; empty
    if that says nothing.
    """

    path: str
    kind: Literal["stale", "missing", "orphan"]
    diff: str = ""


def compare(outputs: Iterable[Output], out: Path, *, complete: bool = False) -> tuple[Drift, ...]:
    """Returns how the output folder differs from the outputs, sorted by path.

    Orphans are generated files that no spec makes any more: looked for in the folders of the outputs'
    attentions, with `complete` (the outputs are those of all specs) in all of `out`.
    """
    expected = {output.path: output.text for output in outputs}
    drifts = []
    for path, text in expected.items():
        try:
            found = out.joinpath(path).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            drifts.append(Drift(path=path, kind="missing"))
            continue
        if found != text:
            drifts.append(Drift(path=path, kind="stale", diff=_diff(found, text, path)))
    folders = (
        [out] if complete else [out / name for name in sorted({path.split("/")[0] for path in expected})]
    )
    for file in (file for folder in folders for file in folder.glob("**/*")):
        path = file.relative_to(out).as_posix()
        if path not in expected and _is_generated(file):
            drifts.append(Drift(path=path, kind="orphan"))
    return tuple(sorted(drifts, key=lambda drift: drift.path))


def write(outputs: Iterable[Output], out: Path, *, complete: bool = False) -> tuple[Drift, ...]:
    """Makes the output folder agree with the outputs; returns what was not so before. Raises OSError.

    Each file is replaced in one step, so that a reader sees the old text or the new one; right files are not
    touched.
    """
    outputs = tuple(outputs)
    drifts = compare(outputs, out, complete=complete)
    texts = {output.path: output.text for output in outputs}
    for drift in drifts:
        path = out / drift.path
        if drift.kind == "orphan":
            _remove(path, out)
        else:
            write_text(path, texts[drift.path], follows=False)  # nothing outside of the folder is written
    return drifts


def _remove(path: Path, out: Path) -> None:
    """Removes a module with its bytecode, and the folders below `out` that have nothing else in them: Python
    imports an empty one.
    """
    path.unlink(missing_ok=True)  # another process may remove the same
    if path.suffix == ".py":
        for bytecode in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            bytecode.unlink(missing_ok=True)
    for folder in (path.parent / "__pycache__", *path.parents):
        if folder == out:
            break
        with suppress(OSError):  # where something is left in it
            folder.rmdir()


def write_text(path: Path, text: str, *, follows: bool = True) -> None:
    """Writes a file in one step: it is never seen half written. Raises OSError, which names the file.

    A file that was there keeps its permissions. What is no file, such as a pipe, is written to as it is.
    follows: a link stays one, and what it leads to is written; else the file takes the place of the link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    place = path.resolve() if follows else path
    temporary = place.with_name(f".{os.getpid()}.tmp")  # short, whatever the file is called
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        if place.exists():
            shutil.copymode(place, temporary)
        temporary.replace(place)
    except OSError as failure:
        failure.filename, failure.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_generated(file: Path) -> bool:
    if file.suffix not in (".py", ".cu", ".cuh") or not file.is_file():
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return MARK in text.read(_HEAD)
    except FileNotFoundError:  # removed meanwhile
        return False


def _diff(found: str, right: str, path: str) -> str:
    lines = difflib.unified_diff(
        found.splitlines(keepends=True), right.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=2
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
