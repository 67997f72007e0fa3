"""The folder in which what was compiled is kept: private to the user. Code is run from there, so a folder
that somebody else could have prepared is refused.
"""

import atexit
import functools
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path


def cache_folder() -> Path:
    """$ATTNC_CACHE_DIR, else the user's cache folder, made with mode 0700. Where the user has none, as in
    many containers, a folder of this process, with a warning.

    PermissionError if $ATTNC_CACHE_DIR cannot be made, is a link, belongs to somebody else or can be written
    by others.
    """
    try:
        return kept_folder()
    except PermissionError as failure:
        if os.environ.get("ATTNC_CACHE_DIR"):
            raise
        return _own_folder_because(str(failure))


def kept_folder() -> Path:
    """Returns the folder that other processes use too. PermissionError where there is none."""
    chosen = os.environ.get("ATTNC_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = private_folder(Path(chosen or Path(base) / "attnc"))
    if not chosen and not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is read-only; set ATTNC_CACHE_DIR to a folder of yours")
    return folder


def private_folder(folder: Path) -> Path:
    """Returns the folder, made with mode 0700 if it is not there. PermissionError as for `cache_folder`."""
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


@functools.cache
def _own_folder_because(reason: str) -> Path:
    warnings.warn(f"{reason}. Until then every process compiles anew.", stacklevel=2)
    return own_folder()


@functools.cache
def own_folder() -> Path:
    """Returns a folder that this process removes when it ends."""
    folder = tempfile.mkdtemp(prefix="attnc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def store_bytes(path: Path, content: bytes) -> None:
    """Writes a file in one step: nobody reads half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:  # a full disk, Ctrl-C
        Path(temporary).unlink(missing_ok=True)
        raise
