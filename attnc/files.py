"""Reading and writing files of the user: whole or not at all, and never over what was saved meanwhile."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SavedMeanwhile(Exception):
    """A file holds another text than the one that its new text was made from."""


def strict_json(data: object) -> str:
    """Returns JSON for any program. It has no number for infinity, and none for what is no number: null."""
    return json.dumps(_without_infinities(data), indent=2, allow_nan=False)


def _without_infinities(data: object) -> object:
    match data:
        case float() if not math.isfinite(data):
            return None
        case dict():
            return {name: _without_infinities(value) for name, value in data.items()}
        case list() | tuple():
            return [*map(_without_infinities, data)]
    return data


def write_text(path: Path, text: str, *, instead_of: bytes | None = None) -> None:
    """Writes a file atomically. Raises OSError, which names the file, and
    SavedMeanwhile.

    A file that was there keeps its permissions, and one that is read-only stays as it is: PermissionError.
    A link stays one, and what it leads to is written. What is no file, such as a pipe, is written to as it
    is. instead_of: what the file must still hold.
    """
    update_text(path, lambda: text, instead_of=instead_of)


def update_text(path: Path, change: Callable[[], str], *, instead_of: bytes | None = None) -> None:
    """Writes what `change` returns, as `write_text` does. It may read the file: no other process of attnc
    writes it meanwhile. Raises what `change` raises, too.
    """

    def put(temporary: Path) -> None:
        if place.exists():
            check_writable(place)
            temporary.chmod(stat.S_IMODE(place.stat().st_mode))
        if instead_of is not None and read_regular(place) != instead_of:
            raise SavedMeanwhile(f"'{path}' was saved meanwhile")
        temporary.replace(place)

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(change(), encoding="utf-8", newline="\n")
        return
    place = path.resolve()
    with locked(place.parent):
        text = change()
        with naming(path):
            _write_beside(place, text, put)


def create_text(path: Path, text: str) -> None:
    """Writes a file that is not there yet, in one step. Raises OSError: FileExistsError for whatever has the
    name, a link to nothing too.
    """

    def put(temporary: Path) -> None:
        try:
            os.link(temporary, path)  # which, unlike a rename, replaces nothing
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            write_new(path, text.encode())

    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), locked(path.parent):
        _write_beside(path, text, put)


def check_writable(path: Path) -> None:
    """Raises PermissionError for a file that is read-only. Replacing it would not ask, and neither would
    writing to it ask root.
    """
    if is_read_only(path.stat().st_mode) or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))


def is_read_only(mode: int) -> bool:
    return not mode & 0o222


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While no other process that asks for the same works in a folder. Where a file system has no locks, and
    on Windows, nobody waits.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, PermissionError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which the end of a process does too, however it ends


def read_regular(path: Path) -> bytes | None:
    """Returns the content of a file; None for a link, a folder or a pipe, and if there is no file. Raises
    OSError for a file that cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | _BINARY
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        handle = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(handle, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(handle).st_mode) else None


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that must not be there yet. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(content)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file of attnc's own in one step, whether or not it was there. Raises OSError."""
    temporary = temporary_name(path.parent)
    try:
        write_new(temporary, content)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


_BINARY: int = getattr(os, "O_BINARY", 0)  # of Windows


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives errors of a block the name of the file that the user knows."""
    try:
        yield
    except OSError as failure:
        failure.filename, failure.filename2 = str(path), None
        raise


# --- temporary files ----------------------------------------------------------------------------------------

_TEMPORARY = re.compile(r"\.attnc-[0-9a-f]{16}\.tmp")


def temporary_name(folder: Path) -> Path:
    """Returns the path of a temporary file or folder in a folder, with a unique name."""
    return folder / f".attnc-{secrets.token_hex(8)}.tmp"


def leftovers(folder: Path) -> list[Path]:
    """Returns the temporary files and folders in a folder. To who has it locked, they are what processes left
    that were killed.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if _TEMPORARY.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _write_beside(place: Path, text: str, put: Callable[[Path], None]) -> None:
    for left in leftovers(place.parent):
        with suppress(OSError):  # folders stay: `attnc.output` has to see what is in them
            left.unlink()
    temporary = temporary_name(place.parent)
    try:
        write_new(temporary, text.encode())
        put(temporary)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
