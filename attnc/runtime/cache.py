"""The folder for generated text that is to be imported: private to the user, addressed by content.

Code is run from there, so a folder that somebody else could have prepared is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """`$ATTNC_CACHE_DIR`, else the user's cache folder; created with mode 0700.

    PermissionError if it cannot be made, is a link, belongs to somebody else or can be written by others.
    """
    return private_folder(Path(os.environ.get("ATTNC_CACHE_DIR") or user_cache_path("attnc")))


def private_folder(folder: Path) -> Path:
    """The folder, created with mode 0700 if it is not there. PermissionError as for `cache_folder`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise PermissionError(
            f"{folder} cannot be made ({failure.strerror}); set ATTNC_CACHE_DIR to a folder of yours"
        ) from failure
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is a link, or others can write to it; remove it or set ATTNC_CACHE_DIR"
        )
    return folder


def store(text: str, suffix: str = ".py") -> Path:
    """The path of a file with exactly this text, written in one step where it is not there yet."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = cache_folder() / f"{digest}{suffix}"
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
    Path(temporary).replace(path)
    return path


def store_bytes(path: Path, content: bytes) -> None:
    """Writes a file of the cache in one step: it is never seen half written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(temporary).replace(path)
