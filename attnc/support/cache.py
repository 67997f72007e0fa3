"""The cache: what was compiled, in a folder that is private to the user.

An entry is its payload with a digest of that behind it, in one file: ELF, which cubins and shared libraries
are, is read from the front and takes no notice. What an entry says is looked at whenever it is read, and one
that is not what was written counts as not there: it is made again. A file is replaced in one step, so
processes need no lock.
"""

import atexit
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .folders import named_path, others_can_write, private_folder

# --- folders ------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Returns $ATTNC_CACHE_DIR, else the user's cache folder, made with mode 0700. Where the user has none,
    as in many containers, a folder of this process, with a warning.

    PermissionError if $ATTNC_CACHE_DIR cannot be made, or somebody else could change what is in it.
    """
    try:
        return kept_folder()
    except PermissionError as failure:
        if os.environ.get("ATTNC_CACHE_DIR"):
            raise
        return _own_folder_because(str(failure))


def kept_folder() -> Path:
    """Returns the folder that other processes use too. PermissionError where there is none."""
    if chosen := os.environ.get("ATTNC_CACHE_DIR"):
        return private_folder(named_path(chosen))
    folder = private_folder(_user_folder() / "attnc")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is read-only; set ATTNC_CACHE_DIR to a folder of yours")
    return folder


def _user_folder() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    if given.is_absolute():  # its standard says that any other is not to be taken
        return given
    try:
        return Path("~/.cache").expanduser()
    except RuntimeError:
        raise PermissionError("the user has no home; set ATTNC_CACHE_DIR to a folder of yours") from None


@functools.cache
def _own_folder_because(reason: str) -> Path:
    warnings.warn(f"{reason}. Until then every process compiles anew.", stacklevel=2)
    return own_folder()


@functools.cache
def own_folder() -> Path:
    """Returns a folder that this process removes when it ends; processes that it forks use it too. Those of
    processes that were killed go now.

    PermissionError where no folder for temporary files is safe from other users.
    """
    refusals = []
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        for left in Path(parent).glob(f"{_OWN}*"):
            if (handle := _lock_own(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
        try:
            folder = _made_own(parent)
        except OSError as failure:
            refusals.append(str(failure))
            continue
        atexit.register(_remove_own, folder, os.getpid())
        return folder
    raise PermissionError(refusals[0])


_OWN = "attnc-process-"


def _made_own(parent: str) -> Path:
    """Makes a folder that is locked for as long as this process, or one that it forks, lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_OWN, dir=parent))
        try:
            private_folder(folder)
        except PermissionError:
            with suppress(OSError):
                folder.rmdir()
            raise
        _lock_own(folder)  # held from now on
        if folder.is_dir():  # or another process has taken it for one that was left, before it was locked
            return folder


def _lock_own(folder: Path) -> int | None:
    """Returns a handle that locks a folder of the user's; None where a process that lives has it locked, and
    where there are no locks.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    except (ImportError, OSError):
        return None
    try:
        if os.fstat(handle).st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not one that it forked
        shutil.rmtree(folder, ignore_errors=True)


# --- entries ------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """path: of the file, which has a digest behind its payload."""

    path: Path
    payload: bytes


def kept_entry(name: str, make: Callable[[], bytes]) -> Entry:
    """Returns an entry of the cache, made where it is not there or is not what was written.

    Where it cannot be written (a full disk, a read-only folder) it goes to a folder of this process, with a
    warning; OSError if the user has named the folder.
    """
    path = cache_folder() / name
    payload = read_sealed(path)
    if payload is None:
        payload = make()
        try:
            store_bytes(path, seal_bytes(name, payload))
        except OSError as failure:
            if os.environ.get("ATTNC_CACHE_DIR"):
                raise
            why = f"{path.parent} cannot be written ({failure.strerror or failure})"
            path = _own_folder_because(why) / name
            store_bytes(path, seal_bytes(name, payload))
    return Entry(path, payload)


_SEAL = b"\nattnc sha256 "
_SEAL_SIZE = len(_SEAL) + 64 + 1


def seal_bytes(name: str, payload: bytes) -> bytes:
    """Returns a payload with its digest behind it. name: of the file; under another one it is not right."""
    return b"%s%s%s\n" % (payload, _SEAL, _digest(name, payload))


def read_sealed(path: Path) -> bytes | None:
    """Returns the payload of a file; None where it is not what was written, or not the user's."""
    content = read_private(path)
    return None if content is None else unseal_bytes(path.name, content)


def unseal_bytes(name: str, content: bytes) -> bytes | None:
    """Returns the payload of what `seal_bytes` returned; None for anything else."""
    payload = content[:-_SEAL_SIZE]
    return payload if content == seal_bytes(name, payload) else None


def _digest(name: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(f"{name}\0".encode())
    digest.update(payload)
    return digest.hexdigest().encode()


# --- files --------------------------------------------------------------------------------------------------


def read_private(path: Path) -> bytes | None:
    """Returns what a file has in it; None where it is not there, cannot be read, is a link, a folder or a
    pipe, belongs to another user, or can be written to by others.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _NO_LINK | _NO_WAIT)
    except OSError:
        return None
    found = os.fstat(handle)
    is_own = not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not others_can_write(found))
    if not (is_own and stat.S_ISREG(found.st_mode)):
        os.close(handle)
        return None
    with suppress(OSError), os.fdopen(handle, "rb") as file:
        return file.read()
    return None


# Windows has neither.
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)


def store_bytes(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes a file atomically; what was there under its name, a link, a folder
    or somebody else's file, is replaced. Raises OSError. mode: of the file, less the process's umask.
    """
    temporary = _temporary(path.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)
        if path.is_dir() and not path.is_symlink():
            discard_path(path)
        temporary.replace(path)
    except BaseException:  # a full disk, Ctrl-C
        temporary.unlink(missing_ok=True)
        raise
    _sweep(path.parent)


def discard_path(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it. Raises OSError."""
    away = _temporary(path.parent)
    with suppress(FileNotFoundError):  # another process may do the same
        path.rename(away)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away, ignore_errors=True)
        else:
            away.unlink()


_PREFIX, _SUFFIX = ".attnc-", ".tmp"
_STALE_SECONDS = 24 * 3600


def _temporary(folder: Path) -> Path:
    return folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"


@functools.cache
def _sweep(folder: Path) -> None:
    with suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            if left.lstat().st_mtime < time.time() - _STALE_SECONDS:
                discard_path(left)
