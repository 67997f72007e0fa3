"""The output folder: what is there, compared with what should be, and made so.

A folder has files of attnc's and perhaps others. Its own are those that its manifest lists with their hashes.
Nothing else is looked at, replaced or removed, and neither is a file of its own that says something else than
when it was written: somebody has edited it.

    outputs --compare--> drifts --stage--> a folder with the new files and a journal --carry out--> manifest

All that is to come is written beside the rest before anything changes. A process that is killed before the
journal is there has changed nothing; what one has left behind that had a journal, the next one carries out.
"""

from __future__ import annotations

import difflib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from attnc.files import is_read_only, leftovers, locked, naming, read_regular, temporary_name, write_new

#: The manifest, at the top of an output folder.
MANIFEST = ".attnc-manifest"
_HEAD = (
    "# Files that attnc wrote to this folder, with their SHA-256 (`sha256sum -c` reads it). It replaces and\n"
    "# removes these alone, and only while they are what it wrote. Keep this file with them.\n"
)
#: What a folder may hold before attnc has written to it: what git wants to see there, and records of runs.
_WELCOME = frozenset({".gitignore", ".gitattributes", ".gitkeep", "__pycache__", "verified.json"})

#: Why what is there is not attnc's to replace or remove. "other": a folder or a pipe. "beyond": a link, or a
#: file, is on the way to it.
Held: TypeAlias = Literal["", "edited", "unlisted", "read-only", "link", "other", "beyond"]
#: What stays whatever one asks for: nothing outside of the folder is written, and no folder is emptied.
_ALWAYS_HELD = ("other", "beyond")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file to write: `path` is relative to the output folder, with forward slashes."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A file that is not what the specs say: `stale`, `missing`, or an `orphan`, which no spec makes.

    held: why attnc does not change it. diff: unified, from the file on disk to the right text; empty if that
    says nothing.
    """

    path: str
    kind: Literal["stale", "missing", "orphan"]
    held: Held = ""
    diff: str = ""


class NotOurs(Exception):
    """Nothing was written: `held` are files in the way; `others` what is in a folder to which attnc has never
    written.
    """

    def __init__(self, held: tuple[Drift, ...], others: tuple[str, ...]) -> None:
        super().__init__(f"{[drift.path for drift in held]}, {others}")
        self.held = held
        self.others = others


def compare(outputs: Iterable[OutputFile], out: Path, *, complete: bool = False) -> tuple[Drift, ...]:
    """Returns how the output folder differs from the outputs, sorted by path. Raises OSError.

    Orphans are listed files that no spec makes any more: in the folders of the outputs' attentions, with
    `complete` (the outputs are those of all specs) in all of `out`.
    """
    return _changes(*_meant(outputs, complete=complete), out).drifts


def write(
    outputs: Iterable[OutputFile],
    out: Path,
    *,
    complete: bool = False,
    force: bool = False,
    beside: bool = False,
) -> tuple[Drift, ...]:
    """Makes the output folder agree with the outputs; returns what was not so before. Right files are not
    touched.

    force: also replaces and removes files that were edited, and others' that are in the way. beside: also
    writes to a folder that attnc has not written to and that is not empty, as `force` does. Raises NotOurs
    where one of them is missing, and OSError.
    """
    return _write(*_meant(outputs, complete=complete), out, force=force, beside=beside)


def write_folder(
    files: Mapping[str, bytes], folder: str, out: Path, *, force: bool = False, beside: bool = False
) -> None:
    """Writes files, by name, to a folder below an output folder, in place of all that the manifest lists
    there. Raises as `write` does.
    """

    def is_meant(path: str) -> bool:
        return path.rpartition("/")[0] == folder

    wanted = {f"{folder}/{name}": content for name, content in files.items()}
    _write(wanted, is_meant, out, force=force, beside=beside)


def write_beside(files: Mapping[str, bytes], out: Path, *, force: bool = False) -> None:
    """Writes files, by path, to a folder beside whatever else is there. Raises as `write` does."""
    _write(files, files.__contains__, out, force=force, beside=True)


def check_places(paths: Iterable[str], out: Path, *, force: bool = False) -> None:
    """Raises NotOurs where `write_beside` would, whatever is to be written to these paths; writes nothing."""
    places = dict.fromkeys(paths, b"")
    changes = _changes(places, places.__contains__, out, force=force)
    if held := tuple(drift for drift in changes.drifts if drift.held):
        raise NotOurs(held, ())


_Wanted: TypeAlias = Mapping[str, bytes]
_IsMeant: TypeAlias = Callable[[str], bool]


def _meant(outputs: Iterable[OutputFile], *, complete: bool) -> tuple[_Wanted, _IsMeant]:
    """Returns the files that are wanted, and whether one that is not is an orphan, by its path. Machine code
    is one where no module is left that it is beside.
    """
    wanted = {output.path: output.text.encode() for output in outputs}
    tops = {path.split("/")[0] for path in wanted}
    folders = {path.rpartition("/")[0] for path in wanted}

    def is_meant(path: str) -> bool:
        folder = path.rpartition("/")[0]
        if path.endswith(".cubin") and folder.rpartition("/")[0] in folders:
            return False
        return complete or path.split("/")[0] in tops

    return wanted, is_meant


# --- what is there ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """What is at a path: a file with a hash, something else, or nothing."""

    digest: str = ""
    barrier: Literal["", "link", "other", "beyond"] = ""
    content: bytes = b""
    mode: int = 0

    @property
    def state(self) -> str:
        return self.barrier or self.digest


def _look(out: Path, path: str) -> _Found:
    place = out
    for part in path.split("/")[:-1]:
        place /= part
        try:
            if not stat.S_ISDIR(place.lstat().st_mode):
                return _Found(barrier="beyond")
        except FileNotFoundError:
            return _Found()
    place = out / path
    try:
        content, mode = read_regular(place), place.lstat().st_mode
    except FileNotFoundError:
        return _Found()
    if content is None:
        return _Found(barrier="link" if stat.S_ISLNK(mode) else "other")
    return _Found(digest=_hash(content), content=content, mode=mode)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()


_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def _read_manifest(manifest: bytes) -> dict[str, set[str]]:
    """Returns the hashes of files by path. Lines that are none are passed over: where two branches were
    merged, each may have written a file.
    """
    listed: dict[str, set[str]] = {}
    for line in manifest.decode(errors="replace").splitlines():
        if (match := _LINE.fullmatch(line)) and _is_below(match[2]):
            listed.setdefault(match[2], set()).add(match[1])
    return listed


def _is_below(path: str) -> bool:
    """Returns whether a path can be one of attnc's: it leads nowhere else, nor to hidden files."""
    return all(part and not part.startswith(".") for part in path.split("/")) and "\\" not in path


def _manifest(listed: Mapping[str, set[str]]) -> bytes:
    lines = sorted((path, digest) for path, digests in listed.items() for digest in digests)
    text = "".join(f"{digest}  {path}\n" for path, digest in lines)
    return (_HEAD + text).encode() if text else b""


# --- what differs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """drifts: sorted by path; before: what is at their paths; manifest: its text afterwards."""

    drifts: tuple[Drift, ...]
    before: Mapping[str, _Found]
    manifest: bytes


def _changes(wanted: _Wanted, is_meant: _IsMeant, out: Path, *, force: bool = False) -> _Changes:
    noted = _look(out, MANIFEST)
    listed = _read_manifest(noted.content)
    for journal in filter(None, map(_read_journal, leftovers(out))):  # what it lists may be in place already
        for path, digests in _read_manifest(journal.manifest or b"").items():
            listed.setdefault(path, set()).update(digests)
    drifts, before = list[Drift](), {MANIFEST: noted}
    after = dict(listed)
    for path in sorted({*wanted, *filter(is_meant, listed)}):
        found = before[path] = _look(out, path)
        drift = _drift(path, found, wanted.get(path), listed.get(path, set()), force=force)
        if drift is not None:
            drifts.append(drift)
        if path in wanted:
            after[path] = {_hash(wanted[path])}
        elif drift is None or not drift.held:
            del after[path]
    manifest = _manifest(after)
    if noted.barrier or noted.content.replace(b"\r\n", b"\n") != manifest:
        kind: Literal["stale", "missing"] = "stale" if noted.state else "missing"
        held = "" if force and noted.barrier == "link" else noted.barrier
        drifts.append(Drift(path=MANIFEST, kind=kind, held=held))
    return _Changes(drifts=tuple(sorted(drifts, key=_path)), before=before, manifest=manifest)


def _path(drift: Drift) -> str:
    return drift.path


def _drift(path: str, found: _Found, wanted: bytes | None, listed: set[str], *, force: bool) -> Drift | None:
    if not found.state:
        return None if wanted is None else Drift(path=path, kind="missing")
    held = _held(found, listed)
    if force and held not in _ALWAYS_HELD:
        held = ""
    if wanted is None:
        return Drift(path=path, kind="orphan", held=held)
    if found.digest == _hash(wanted):
        return None
    return Drift(path=path, kind="stale", held=held, diff=_diff(found.content, wanted, path))


def _held(found: _Found, listed: set[str]) -> Held:
    if found.barrier:
        return found.barrier
    if found.digest not in listed:
        return "edited" if listed else "unlisted"
    return "read-only" if is_read_only(found.mode) else ""


def _diff(found: bytes, right: bytes, path: str) -> str:
    if not found or path.endswith(".cubin"):
        return ""
    before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (found, right))
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=2)
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def _others(wanted: _Wanted, out: Path) -> tuple[str, ...]:
    """Returns the files of a folder to which attnc seems never to have written: it has neither a manifest nor
    one of the wanted files.
    """
    if not out.is_dir() or _look(out, MANIFEST).state:
        return ()
    entries = {entry.name for entry in out.iterdir()} - _WELCOME - {left.name for left in leftovers(out)}
    if any(_look(out, path).digest == _hash(content) for path, content in wanted.items()):
        return ()
    return tuple(sorted(entries))


# --- making it so -------------------------------------------------------------------------------------------


def _write(wanted: _Wanted, is_meant: _IsMeant, out: Path, *, force: bool, beside: bool) -> tuple[Drift, ...]:
    """Writes what is wanted, once what others have begun is done; where nothing is to do, locks nothing."""
    if not leftovers(out) and not _changes(wanted, is_meant, out, force=force).drifts:
        return ()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        seen = changes = _changes(wanted, is_meant, out, force=force)
        if left := leftovers(out):
            with naming(out):
                for staging in left:
                    _carry_out(staging, out)
            changes = _changes(wanted, is_meant, out, force=force)
        if not (force or beside) and (others := _others(wanted, out)):
            raise NotOurs((), others)
        if held := tuple(drift for drift in changes.drifts if drift.held and drift.kind != "orphan"):
            raise NotOurs(held, ())
        if changes.drifts:
            for drift in changes.drifts:
                check_folder(out / drift.path)
            with naming(out):
                _carry_out(_stage(changes, wanted, out), out)
    return seen.drifts


@dataclass(frozen=True, slots=True)
class _Journal:
    """What a staging folder is for. steps: path, state before, and hash afterwards, "" for a file that goes;
    the new text of step 3 is in the file `3`. manifest: as it is to be, None where that has been done.
    """

    steps: tuple[tuple[str, str, str], ...]
    manifest: bytes | None


def _read_journal(staging: Path) -> _Journal | None:
    if staging.is_symlink() or (content := read_regular(staging / "journal")) is None:
        return None
    try:
        steps = tuple((str(path), str(before), str(after)) for path, before, after in json.loads(content))
    except (ValueError, TypeError):
        return None
    return _Journal(steps, read_regular(staging / "manifest"))


def _stage(changes: _Changes, wanted: _Wanted, out: Path) -> Path:
    staging, steps = temporary_name(out), list[tuple[str, str, str]]()
    try:
        staging.mkdir()
        for drift in changes.drifts:
            if drift.held or drift.path == MANIFEST:
                continue
            found, new = changes.before[drift.path], staging / str(len(steps))
            if drift.kind == "orphan":
                steps.append((drift.path, found.state, ""))
                continue
            write_new(new, wanted[drift.path])
            if found.digest:
                new.chmod(stat.S_IMODE(found.mode))
            steps.append((drift.path, found.state, _hash(wanted[drift.path])))
        write_new(staging / "manifest", changes.manifest)
        write_new(staging / "journal", json.dumps(steps).encode())
    except BaseException:  # a full disk, Ctrl-C
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return staging


def check_folder(place: Path) -> None:
    """Raises OSError where no file can be written at a place, whose folders may be missing."""
    folder = next(parent for parent in place.parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "the folder cannot be written to", str(folder))


def _carry_out(staging: Path, out: Path) -> None:
    """Does what a journal says, from where it was left, and removes the staging folder. What has changed
    since the journal was written stays as it is. Raises OSError.
    """
    if journal := _read_journal(staging):
        for number, (path, before, after) in enumerate(journal.steps):
            if not _is_below(path) or _look(out, path).state != before:
                continue
            if not after:
                _remove(out / path, out)
            elif _look(staging, str(number)).digest == after:
                _put(staging / str(number), out / path)
        if journal.manifest:
            (staging / "manifest").replace(out / MANIFEST)
        elif journal.manifest == b"":
            (out / MANIFEST).unlink(missing_ok=True)
    if staging.is_dir() and not staging.is_symlink():
        shutil.rmtree(staging)
    else:
        staging.unlink(missing_ok=True)


def _put(new: Path, place: Path) -> None:
    """Moves a file to its place. Python takes bytecode for that of a file by its size and the second in which
    it was written: so it gets another second than the one that was there.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    _forget_bytecode(place)
    with suppress(FileNotFoundError):
        before, now = place.lstat(), new.stat()
        if now.st_mtime_ns // _SECOND <= before.st_mtime_ns // _SECOND:
            os.utime(new, ns=(now.st_atime_ns, before.st_mtime_ns + _SECOND))
    new.replace(place)


def _remove(place: Path, out: Path) -> None:
    """Removes a file with its bytecode, and the folders below `out` that have nothing else in them: Python
    imports an empty one.
    """
    place.unlink(missing_ok=True)
    _forget_bytecode(place)
    for folder in (place.parent / "__pycache__", *place.parents):
        if folder == out:
            break
        with suppress(OSError):  # where something is left in it
            folder.rmdir()


def _forget_bytecode(place: Path) -> None:
    folder = place.parent / "__pycache__"
    if place.suffix == ".py" and not folder.is_symlink():
        for bytecode in folder.glob(f"{glob.escape(place.stem)}.*.pyc"):
            bytecode.unlink(missing_ok=True)


_SECOND = 1_000_000_000
