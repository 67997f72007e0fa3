"""The folder for generated text that is to be imported: private to the user, addressed by content.

Code is run from there, so a folder that somebody else could have prepared is refused.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from functools import cache as once
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """`$ATTNC_CACHE_DIR`, else the user's cache folder; created with mode 0700. Where the user has none, as
    in many containers, a folder of this process, with a warning.

    PermissionError if $ATTNC_CACHE_DIR cannot be made, is a link, belongs to somebody else or can be written
    by others.
    """
    try:
        return kept_folder()
    except PermissionError as failure:
        if "ATTNC_CACHE_DIR" in os.environ:
            raise
        return _instead(str(failure))


def kept_folder() -> Path:
    """The same without an instead: where other processes find what this one keeps. PermissionError."""
    chosen = os.environ.get("ATTNC_CACHE_DIR")
    folder = private_folder(Path(chosen or user_cache_path("attnc")))
    if not chosen and not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is read-only; set ATTNC_CACHE_DIR to a folder of yours")
    return folder


@once
def _instead(reason: str) -> Path:
    warnings.warn(f"{reason}. Until then every process compiles anew.", stacklevel=2)
    return own_folder()


@once
def own_folder() -> Path:
    """A folder that this process removes when it ends."""
    folder = tempfile.mkdtemp(prefix="attnc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def private_folder(folder: Path) -> Path:
    """The folder, created with mode 0700 if it is not there. PermissionError as for `cache_folder`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise PermissionError(
            f"{folder} cannot be made ({failure.strerror}); set ATTNC_CACHE_DIR to a folder of yours"
        ) from failure
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        wrong = "is a link"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to another user ({found.st_uid})"
    elif found.st_mode & 0o022:
        wrong = "is not private: others can write to it"
    else:
        return folder
    raise PermissionError(f"{folder} {wrong}; remove it or set ATTNC_CACHE_DIR")


def store(text: str, suffix: str = ".py") -> Path:
    """The path of a file with exactly this text, written in one step where it is not there yet."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = cache_folder() / f"{digest}{suffix}"
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    store_bytes(path, text.encode())
    return path


def store_bytes(path: Path, content: bytes) -> None:
    """Writes a file of the cache in one step: it is never seen half written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:  # a full disk, Ctrl-C
        Path(temporary).unlink(missing_ok=True)
        raise
